"""Connections that send no request, or never a whole one, keep nobody out."""

import contextlib
import socket
import subprocess
import sys
import textwrap
from urllib.parse import urlsplit

import pytest

from regard.viewer import _connections
from regard.viewer._server import Viewer
from viewer.test_server import ask, hang_up


def connected(address, sent=b""):
    """A connection on which this was sent; its end is waited for half a minute at most."""
    parts = urlsplit(address)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=30)
    connection.sendall(sent)
    return connection


def request(address, path="data/about", more=""):
    parts = urlsplit(address)
    return f"GET {parts.path}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{more}\r\n".encode()


def whole_answer(connection):
    """One answer, of the length that its headers say."""
    data = read_on(connection, b"")
    while b"\r\n\r\n" not in data:
        data = read_on(connection, data)
    headers, _, body = data.partition(b"\r\n\r\n")
    (length,) = [
        int(line.split(b":")[1])
        for line in headers.lower().split(b"\r\n")
        if line.startswith(b"content-length")
    ]
    while len(body) < length:
        body = read_on(connection, body)
    return headers


def read_on(connection, data):
    more = connection.recv(4096)
    assert more, f"the connection was closed after {data!r}"
    return data + more


@pytest.fixture
def impatient(recording, monkeypatch):
    """A viewer that waits a tenth of a second for a request."""
    monkeypatch.setattr(_connections, "REQUEST_TIMEOUT_S", 0.1)
    with Viewer([recording]) as viewer:
        yield viewer.address


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: x"])
def test_a_request_that_is_never_finished_is_not_waited_for(impatient, sent):
    with connected(impatient, sent) as connection:
        assert connection.recv(100) == b""
    assert ask(impatient, "data/about").status == 200


def test_a_request_that_comes_byte_by_byte_has_no_more_time(impatient):
    with connected(impatient, b"GET / HTTP/1.1\r\n") as connection:
        connection.settimeout(0.02)
        for _ in range(1500):  # half a minute
            try:
                if connection.recv(1) == b"":
                    return
            except TimeoutError:
                pass
            except ConnectionResetError:  # a byte came after it was closed
                return
            with contextlib.suppress(OSError):  # closed between the two
                connection.sendall(b"x")
    pytest.fail("the connection stayed open for half a minute")


@pytest.mark.parametrize("more", [b"GET / HT", b"0123"])
def test_what_is_half_sent_after_an_answer_is_not_waited_for(impatient, more):
    length = "Content-Length: 9\r\n" if more == b"0123" else ""
    with connected(impatient, request(impatient, more=length) + more) as connection:
        assert whole_answer(connection).startswith(b"HTTP/1.1 200")
        assert connection.recv(100) == b""


def test_an_answer_may_take_longer_than_a_request(recording, impatient, monkeypatch):
    import threading

    from regard.viewer.answer import Answers

    answer = Answers.answer

    def slowly(self, path, query=""):
        threading.Event().wait(0.5)
        return answer(self, path, query)

    monkeypatch.setattr(Answers, "answer", slowly)
    assert ask(impatient, "data/about").status == 200


def test_several_requests_go_over_one_connection(recording):
    with Viewer([recording]) as viewer, connected(viewer.address) as connection:
        for _ in range(3):
            connection.sendall(request(viewer.address))
            assert whole_answer(connection).startswith(b"HTTP/1.1 200")


def test_the_connection_that_was_idle_longest_makes_room(recording, monkeypatch):
    monkeypatch.setattr(_connections, "MAX_CONNECTIONS", 4)
    with Viewer([recording]) as viewer, contextlib.ExitStack() as open_ones:
        idle = [open_ones.enter_context(connected(viewer.address)) for _ in range(20)]
        assert ask(viewer.address, "data/about").status == 200
        for connection in idle[:16]:
            assert connection.recv(100) == b""
        idle[-1].sendall(request(viewer.address))
        assert whole_answer(idle[-1]).startswith(b"HTTP/1.1 200")
        hang_up(viewer.address, "about")


SERVER = """
    import resource, sys
    import numpy as np
    from regard.recording import Layer, Recording
    from regard.viewer._server import Viewer

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    with Viewer([Recording(["a"], [Layer(*np.ones((3, 1, 1, 1), np.float32))])]) as viewer:
        print(viewer.address, flush=True)
        sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
def test_256_idle_connections_to_a_process_of_256_files_keep_nobody_out():
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[0] != resource.RLIM_INFINITY and limits[0] < 1024:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limits[1]), limits[1]))
    line = [sys.executable, "-c", textwrap.dedent(SERVER)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(line, **pipes) as process, contextlib.ExitStack() as open_ones:
        address = process.stdout.readline().decode().strip()
        for _ in range(256):
            open_ones.enter_context(connected(address, b"GET / HTTP/1.1\r\n"))
        assert ask(address, "data/about").status == 200
        _, err = process.communicate(timeout=60)
    assert err == b""
