"""The viewer's server: for its owner on this machine alone, read-only, and hard to wear out."""

import asyncio
import functools
import gc
import gzip
import http.client
import json
import socket
import threading
import tracemalloc
from urllib.parse import urlsplit

import numpy as np
import pytest

import regard
from regard.viewer import _server, view
from regard.viewer._server import HEADERS, Viewer, Workers, page_files
from regard.viewer.answer import Answers
from viewer.conftest import made

TILE = "tile?layer={}&head={}&plane=max&level=0&row=0&column=0"


class Reply:
    """What a request got."""

    def __init__(self, response):
        self.status, self.headers, self.body = response.status, response.headers, response.read()

    @property
    def sentence(self):
        return self.body.decode()


def ask(address, path="", method="GET", absolute=False, **headers):
    """A request as no browser sends it: nothing in it is mended on the way."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path if absolute else parts.path + path, headers=given)
    try:
        return Reply(connection.getresponse())
    finally:
        connection.close()


@pytest.fixture(scope="module")
def address(recording):
    with Viewer([recording]) as viewer:
        yield viewer.address


def test_it_gives_the_page_and_the_answers(address, recording):
    assert b"<html" in ask(address).body
    assert ask(address, "boot.js").headers["Content-Type"] == "text/javascript; charset=utf-8"
    found = ask(address, "data/row?layer=1&head=2&query=5")
    assert found.body == Answers([recording]).answer("row", "layer=1&head=2&query=5").body
    assert found.headers["Regard-Coverage"] == "1"
    refused = ask(address, "data/row?layer=9")
    assert (refused.status, refused.sentence) == (400, "layer is 9; there are 2, 0 to 1.")


def test_it_listens_to_this_machine_alone(recording):
    with Viewer([recording]) as viewer:
        assert viewer._socket.getsockname()[0] == "127.0.0.1"
        assert urlsplit(viewer.address).hostname == "127.0.0.1"


def test_who_does_not_know_the_token_sees_nothing(address):
    token = urlsplit(address).path.strip("/")
    assert len(token) >= 32
    for path in (
        "/", "/data/about", "/index.html", f"/{token[:-1]}/", f"/{token}x/data/about",
        f"/{token.swapcase()}/data/about", "//", f"//{token}/", "/%00/", "/%ff/data/about",
        f"/data/about?token={token}",
    ):  # fmt: skip
        found = ask(address, path, absolute=True)
        assert found.status == 404, path
        assert token not in found.sentence


@pytest.mark.parametrize("port", [-1, 65536, 70000, 2**80])
def test_a_port_that_is_none_is_refused(recording, port):
    with pytest.raises(ValueError, match=f"port is {port}; 0 to 65535 is needed, where 0 takes"):
        view(recording, open_browser=False, port=port)


@pytest.mark.parametrize("port", [True, 80.0, float("nan"), "80", None])
def test_a_port_that_is_no_int_is_refused(recording, port):
    with pytest.raises(TypeError, match=f"port is {port!r}; an int from 0 to 65535 is needed"):
        view(recording, open_browser=False, port=port)


def test_every_viewer_has_a_token_and_a_port_of_its_own(recording):
    with view(recording, open_browser=False) as one, view(recording, open_browser=False) as two:
        paths = {urlsplit(viewer.address).path for viewer in (one, two)}
        assert len(paths) == 2
        assert ask(two.address, urlsplit(one.address).path, absolute=True).status == 404


def test_the_address_without_its_last_stroke_leads_to_the_page(address):
    found = ask(address.rstrip("/"))
    assert found.status == 307
    assert found.headers["Location"] == urlsplit(address).path


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "LOCALHOST"])
def test_the_machines_own_names_are_answered(address, host):
    assert ask(address, "data/about", Host=f"{host}:{urlsplit(address).port}").status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{}", "127.0.0.1", "127.0.0.1.evil.example:{}", ""]
)
def test_another_name_for_this_machine_is_refused(address, host):
    # A page elsewhere whose name comes to mean 127.0.0.1 would otherwise read everything.
    found = ask(address, "data/about", Host=host.format(urlsplit(address).port))
    assert found.status == 403
    assert "open the address it printed" in found.sentence


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_written(address, method):
    found = ask(address, "data/about", method=method)
    assert found.status == 405
    assert found.headers["Allow"] == "GET, HEAD"


def test_head_tells_what_get_would_give(address):
    got, told = ask(address, "data/about"), ask(address, "data/about", method="HEAD")
    assert (told.status, told.body) == (200, b"")
    assert told.headers["Content-Length"] == str(len(got.body))


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("", "GET", 200),
        ("style.css", "GET", 200),
        ("data/about", "GET", 200),
        ("data/row", "GET", 400),
        ("data/nothing", "GET", 404),
        ("nothing", "GET", 404),
        ("", "POST", 405),
    ],
)
def test_every_answer_forbids_whatever_the_page_does_not_need(address, path, method, status):
    found = ask(address, path, method=method)
    assert found.status == status
    assert {name: found.headers[name] for name in HEADERS} == HEADERS
    for name, value in (
        ("Cache-Control", "no-store"),
        ("Cross-Origin-Opener-Policy", "same-origin"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        ("Referrer-Policy", "no-referrer"),  # the address holds the token
        ("X-Content-Type-Options", "nosniff"),
    ):
        assert found.headers[name] == value
    policy = found.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy


@pytest.mark.parametrize(
    "path",
    [
        "../_server.py", "%2e%2e/_server.py", "..%2f_server.py", "....//_server.py", "/etc/passwd",
        "%2fetc%2fpasswd", "data/../../_server.py", "boot.js%00.html", "./boot.js", "BOOT.JS",
        "page/boot.js", "__init__.py", "boot.js/", "C:%5cboot.ini", "%c0%ae%c0%ae/",
    ],
)  # fmt: skip
def test_no_path_reaches_the_file_system(address, path):
    found = ask(address, path)
    assert found.status == 404
    assert b"import" not in found.body


def test_only_files_of_the_page_are_served():
    assert {name.rpartition(".")[2] for name in page_files()} == {"html", "js", "css"}


def test_modules_in_folders_are_served_and_answers_too(address):
    module = ask(address, "data/source.js")
    assert module.headers["Content-Type"] == "text/javascript; charset=utf-8"
    assert b"export class Source" in module.body
    assert ask(address, "data/about").headers["Content-Type"] == "application/json"
    assert ask(address, "data").status == ask(address, "map/").status == 404


def test_files_of_the_page_are_compressed_for_who_can_read_it(address):
    plain = ask(address, "boot.js")
    assert plain.headers["Content-Encoding"] is None
    for _ in range(2):
        packed = ask(address, "boot.js", Accept_Encoding="gzip")
        assert packed.headers["Content-Encoding"] == "gzip"
        assert packed.headers["Content-Type"] == plain.headers["Content-Type"]
        assert len(packed.body) < len(plain.body) / 3
        assert gzip.decompress(packed.body) == plain.body


def test_long_json_is_compressed_for_who_can_read_it(address):
    plain = ask(address, "data/heads?layer=0")
    packed = ask(address, "data/heads?layer=0", Accept_Encoding="br, gzip")
    assert packed.headers["Content-Encoding"] == "gzip"
    assert plain.headers["Content-Encoding"] is None
    assert gzip.decompress(packed.body) == plain.body
    assert len(packed.body) < len(plain.body) / 2
    assert ask(address, "data/about", Accept_Encoding="gzip").headers["Content-Encoding"] is None


def test_hostile_tokens_travel_as_data(serve):
    tokens = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\u202e\ud800"]
    layer = regard.recording.Layer(*np.ones((2, 1, 3, 2)))
    address = serve(regard.Recording(tokens, [layer], model="<b>"), names=["<i>&"])
    found = ask(address, "data/tokens?side=key")
    assert found.headers["Content-Type"] == "application/json"
    assert json.loads(found.body) == tokens
    assert json.loads(ask(address, "data/about").body)["recordings"][0]["name"] == "<i>&"
    assert b"alert" not in ask(address).body


@pytest.mark.parametrize(
    "request_bytes", [b"\0\0\0\0\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b""]
)
def test_what_is_no_request_harms_nothing(address, request_bytes):
    parts = urlsplit(address)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(request_bytes)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    assert ask(address, "data/about").status == 200


def hang_up(address, path):
    """Asks, and does not wait for the answer."""
    parts = urlsplit(address)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        line = f"GET {parts.path}data/{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n"
        connection.sendall(line.encode())


def all_at_once(count, work):
    """Runs ``work(n)`` in as many threads, and gives what each returned."""
    found = [None] * count

    def run(n):
        found[n] = work(n)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_64_clients_get_what_they_ask_for_while_others_hang_up(serve):
    recording = made(tokens=256, layers=4, heads=4)
    answers = Answers([recording])
    address = serve(recording)

    @functools.cache
    def expected(tile):
        path, _, query = tile.partition("?")
        return answers.answer(path, query).body

    def client(n):
        tile = TILE.format(n % 4, n // 4 % 4)
        if n % 4 == 3:
            return hang_up(address, tile)
        found = ask(address, f"data/{tile}")
        return found.status == 200 and found.body == expected(tile)

    def one_round():
        assert [found for found in all_at_once(64, client) if found is not None] == [True] * 48
        gc.collect()
        return threading.active_count(), tracemalloc.get_traced_memory()[0]

    one_round()
    tracemalloc.start()
    try:
        one_round()
        threads, held = one_round()
        for _ in range(3):
            threads_later, held_later = one_round()
        # A round's tiles are 16 MB.
        assert threads_later <= threads
        assert held_later < held + 2_000_000
    finally:
        tracemalloc.stop()


def test_requests_of_clients_that_hung_up_do_not_pile_up(recording, monkeypatch):
    begun, go_on = threading.Semaphore(0), threading.Event()
    answered = []

    def slowly(self, path, query=""):
        answered.append(query)
        begun.release()
        assert go_on.wait(30)
        return answer(self, path, query)

    answer = Answers.answer
    monkeypatch.setattr(Answers, "answer", slowly)
    with Viewer([recording]) as viewer:
        workers, submitted = viewer._workers, []
        submit = workers.submit
        monkeypatch.setattr(workers, "submit", lambda work: submitted.append(1) or submit(work))
        clients = [
            threading.Thread(target=ask, args=(viewer.address, f"data/about?{name}"))
            for name in [*["busy"] * len(workers._threads), "stays"]
        ]
        try:
            for client in clients[:-1]:
                client.start()
                assert begun.acquire(timeout=30)
            all_at_once(40, lambda n: hang_up(viewer.address, f"about?gone={n}"))
            asked = len(workers._threads) + 40
            assert settles(lambda: len(submitted) == asked and not workers._waiting)
            clients[-1].start()
            assert settles(lambda: len(workers._waiting) == 1)
        finally:
            go_on.set()
        for client in clients:
            client.join()
    assert answered == ["busy"] * len(workers._threads) + ["stays"]


def settles(is_so):
    """Whether it becomes so within half a minute."""
    for _ in range(3000):
        if is_so():
            return True
        threading.Event().wait(0.01)
    return False


def test_more_requests_than_can_wait_are_refused():
    go_on = threading.Event()
    workers = Workers(1, max_queued=2)
    first = workers.submit(lambda: go_on.wait(30))
    assert settles(first.running)
    second, third = workers.submit(lambda: 2), workers.submit(lambda: 3)
    assert workers.submit(lambda: 4) is None
    workers.cancel(second)
    fourth = workers.submit(lambda: 4)
    go_on.set()
    assert (third.result(30), fourth.result(30)) == (3, 4)
    assert workers.close(30)
    assert workers.submit(lambda: 5) is None


def test_a_server_without_time_says_so(recording, monkeypatch):
    monkeypatch.setattr(Workers, "submit", lambda self, work: None)
    with Viewer([recording]) as viewer:
        found = ask(viewer.address, "data/about")
    assert found.status == 503
    assert "try again" in found.sentence


def test_a_server_that_is_ending_says_so_to_what_it_is_asked_and_to_what_waits(recording):
    go_on = threading.Event()
    with Viewer([recording]) as viewer:
        workers, found = viewer._workers, []
        running = [workers.submit(lambda: go_on.wait(30)) for _ in workers._threads]
        assert settles(lambda: all(future.running() for future in running))
        waiting = threading.Thread(
            target=lambda: found.append(ask(viewer.address, "data/about")), daemon=True
        )
        waiting.start()
        assert settles(lambda: workers._waiting)
        workers.close(0)
        waiting.join(30)
        found.append(ask(viewer.address, "data/about"))
        go_on.set()
    assert [(one.status, one.sentence) for one in found] == [
        (503, "The server has ended: run regard view again.\n")
    ] * 2


def test_too_little_memory_is_said_and_survived(recording, monkeypatch):
    def answer(self, path, query=""):
        raise MemoryError

    with Viewer([recording]) as viewer:
        with monkeypatch.context() as patch:
            patch.setattr(Answers, "answer", answer)
            found = ask(viewer.address, "data/about")
            assert (found.status, found.sentence) == (
                503,
                "There is too little memory to answer this.",
            )
        assert ask(viewer.address, "data/about").status == 200


def test_closing_frees_the_port_and_the_threads(recording):
    before = threading.active_count()
    viewer = view(recording, open_browser=False)
    port = urlsplit(viewer.address).port
    assert repr(viewer) == viewer.address
    assert ask(viewer.address, "data/about").status == 200
    assert viewer.close()
    assert viewer.close()
    assert threading.active_count() == before
    with view(recording, open_browser=False, port=port) as again:
        assert urlsplit(again.address).port == port
    with pytest.raises(OSError, match=r"."):
        ask(viewer.address)


def test_a_loop_that_outlives_the_closing_ends_well(recording, monkeypatch):
    monkeypatch.setattr(_server, "SHUTDOWN_TIMEOUT_S", 0.0)
    viewer, failed = Viewer([recording]), []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    goes_on, shutdown = threading.Event(), viewer._server.shutdown

    async def late(sockets=None):
        await asyncio.get_running_loop().run_in_executor(None, goes_on.wait)
        await shutdown(sockets)

    monkeypatch.setattr(viewer._server, "shutdown", late)
    assert ask(viewer.address, "data/about").status == 200
    assert not viewer.close()
    goes_on.set()
    viewer._thread.join(30)
    assert not viewer._thread.is_alive()
    assert failed == []


def test_a_port_that_is_taken_is_an_error_and_leaves_nothing_behind(recording):
    with view(recording, open_browser=False) as viewer:
        threads, port = threading.active_count(), urlsplit(viewer.address).port
        told = f"viewer: port {port} cannot be used: .* in use; port=0 takes a free one"
        with pytest.raises(OSError, match=told):
            view(recording, open_browser=False, port=port)
        assert threading.active_count() == threads


def test_a_recording_opens_itself_in_the_browser(recording, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    with recording.view() as viewer:
        assert opened == [f"{viewer.address}#L0H2"]
    with recording.view(other=made(seed=1), open_browser=False) as viewer:
        assert len(json.loads(ask(viewer.address, "data/about").body)["recordings"]) == 2
    assert len(opened) == 1
