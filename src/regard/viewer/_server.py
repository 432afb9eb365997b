"""The server of ``regard view``: page and data, on this machine, at a secret address."""

from __future__ import annotations

import asyncio
import atexit
import functools
import gzip
import hmac
import numbers
import os
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from regard._base.extras import needed_by
from regard.recording import Recording
from regard.viewer._bundle import bundle, page_paths, style_sheet
from regard.viewer._heads import Corpus
from regard.viewer._readings import MAX_BODY_BYTES, Readings, too_long
from regard.viewer.answer import JSON, TEXT, Answer, Answers

with needed_by("The viewer"):
    import uvicorn
    from starlette.datastructures import Headers
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response

    from regard.viewer._connections import (
        ACCEPT_BATCH,
        BACKLOG,
        REQUEST_TIMEOUT_S,
        Connection,
        Server,
    )

HOST = "127.0.0.1"
HTTP_PORT = 80
LARGEST_PORT = 65535
WORKERS = 8  # more than the tiles a page requests at once, which may all wait for a first round
MAX_QUEUED = 512  # requests; a browser sends six at a time
GZIP = {"Content-Encoding": "gzip"}
MIN_COMPRESSED_BYTES = 1024  # bytes of JSON, or of a file of the page
SHUTDOWN_TIMEOUT_S = 1.0  # for responses in progress
READ = "data/read"

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Viewer:
    """A viewer that is being served; its ``repr`` is the address to open.

    Every group of a recording is served, in the background, until ``close``, the end of a ``with``
    block, or of Python.

    Args:
        recordings: to look at, and their names, by default those of their models.
        port: to serve on; 0 takes one that is free.
        readings: texts instead, of a page with an input; then there are no recordings.
        corpus: as of ``Answers``.

    Attributes:
        address: ``http://127.0.0.1:PORT/TOKEN/``; whoever knows it can read the recordings, from
            this machine alone.

    Raises:
        OSError: the port is taken.
        TypeError, ValueError: as ``Answers``, or what is no port.
    """

    def __init__(
        self,
        recordings: Sequence[Recording[Any]],
        names: Sequence[str] | None = None,
        port: int = 0,
        readings: Readings | None = None,
        corpus: Corpus | None = None,
    ) -> None:
        check_port(port)
        self._answers = readings or Answers.of_groups(recordings, names, corpus)
        self._socket = _bound(port)
        self._workers = Workers(WORKERS)
        port = self._socket.getsockname()[1]
        token = secrets.token_urlsafe(24)
        self.address = f"http://{HOST}:{port}/{token}/"
        app = App(self._answers, token, port, self._workers)
        self._server = Server(_config(app))
        self._thread = threading.Thread(target=self._run, name="regard viewer", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _run(self) -> None:
        with self._socket:  # closed by who listens: its loop fails if another thread closes it
            self._server.run(sockets=[self._socket])

    def wait(self) -> None:
        """Blocks until the viewer is closed."""
        while self._thread.is_alive():
            self._thread.join(0.2)  # short, for Ctrl-C waits until the join ends on Windows

    def close(self) -> bool:
        """Stops serving; True if nothing is left running."""
        atexit.unregister(self.close)
        self._server.should_exit = True
        self._server.force_exit = True
        end = time.monotonic() + SHUTDOWN_TIMEOUT_S
        is_idle = self._workers.close(SHUTDOWN_TIMEOUT_S)
        self._thread.join(max(0.0, end - time.monotonic()))
        self._answers.close()
        return is_idle and not self._thread.is_alive()

    def __enter__(self) -> Viewer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return self.address


def check_port(port: Any) -> None:
    """Refuses what is no port; ``Viewer`` does.

    Raises:
        TypeError: no int.
        ValueError: out of range.
    """
    way_out = f"0 to {LARGEST_PORT} is needed, where 0 takes a port that is free."
    is_int = isinstance(port, numbers.Integral) and not isinstance(port, bool)
    if not is_int:
        raise TypeError(f"viewer: port is {port!r}; an int from {way_out}")
    if not 0 <= port <= LARGEST_PORT:
        raise ValueError(f"viewer: port is {port}; {way_out}")


def _bound(port: int) -> socket.socket:
    """A socket that listens to this machine alone; port 0 takes a free one."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if os.name == "posix":  # elsewhere it would let two share a port
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((HOST, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        told = f"viewer: port {port} cannot be used: {error.strerror}; port=0 takes a free one."
        raise OSError(error.errno, told) from error
    return bound


def _config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=Connection,
        backlog=ACCEPT_BATCH,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
    )


class Workers:
    """Threads that compute responses; closing cancels what is queued.

    They are daemons, unlike those of ``concurrent.futures``: Ctrl-C does not wait for them.
    """

    def __init__(self, count: int, max_queued: int = MAX_QUEUED) -> None:
        self._max_queued = max_queued
        self._waiting: dict[Future[Any], Callable[[], Any]] = {}  # FIFO queue
        self._changed = threading.Condition()
        self._closed = False  # read without the lock too: it is set once
        self._threads = [
            threading.Thread(target=self._work, name="regard answers", daemon=True)
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def closed(self) -> bool:
        return self._closed

    def submit(self, work: Callable[[], Any]) -> Future[Any] | None:
        """A future of ``work``'s result; None where the queue is full, or closed."""
        future: Future[Any] = Future()
        with self._changed:
            if self._closed or len(self._waiting) >= self._max_queued:
                return None
            self._waiting[future] = work
            self._changed.notify()
        return future

    def cancel(self, future: Future[Any]) -> None:
        """Takes it out of the queue; work that has begun goes on."""
        with self._changed:
            self._waiting.pop(future, None)
        future.cancel()

    def _work(self) -> None:
        while (item := self._next()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)
            del item, future, work  # no response is kept until the next request

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            if self._closed:
                return None
            future = next(iter(self._waiting))
            return future, self._waiting.pop(future)

    def close(self, timeout_s: float) -> bool:
        """Cancels what is queued and ends the threads; True if all ended in time."""
        with self._changed:
            self._closed = True
            cancelled, self._waiting = self._waiting, {}
            self._changed.notify_all()
        for future in cancelled:
            future.cancel()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


class App:
    """The ASGI application: only with the token, only under this machine's names.

    It can be read; where the page has an input, a text can be sent to be read by the model.
    """

    def __init__(
        self, answers: Answers | Readings, token: str, port: int, workers: Workers
    ) -> None:
        self._answers, self._token, self._workers = answers, token, workers
        self._hosts = {f"{host}:{port}" for host in (HOST, "localhost", "[::1]")}
        if port == HTTP_PORT:  # which browsers leave out
            self._hosts |= {HOST, "localhost", "[::1]"}
        self._files = page_files()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            response = await self._respond(Request(scope, receive))
            if response is not None:
                response.headers.update(HEADERS)
                await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response | None:
        if request.headers.get("host", "").lower() not in self._hosts:
            hosts = ", ".join(sorted(self._hosts))
            return _text(403, f"This viewer answers to {hosts} alone; open the address it printed.")
        token, slash, path = request.scope["path"].removeprefix("/").partition("/")
        is_known = hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self._token.encode())
        if is_known and path == READ and isinstance(self._answers, Readings):
            return await self._read(request, self._answers)
        if request.method not in ("GET", "HEAD"):
            return _not_allowed("GET, HEAD", "This viewer can be read, not written to")
        if not is_known:
            return _text(404, "There is nothing here; open the whole address that was printed.")
        if not slash:
            return Response(status_code=307, headers={"Location": f"/{self._token}/"})
        if (path or "index.html") in self._files:  # before the endpoints: data/ has modules too
            return self._file(path or "index.html", _takes_gzip(request))
        if path.startswith("data/"):
            return await self._data(request, path.removeprefix("data/"))
        return _text(404, "The page has no file of that name.")

    def _file(self, path: str, compressed: bool) -> Response:
        body, media_type = self._files[path]
        if not compressed or len(body) < MIN_COMPRESSED_BYTES:
            return Response(body, media_type=media_type)
        return Response(_compressed_file(body), headers=GZIP, media_type=media_type)

    async def _read(self, request: Request, readings: Readings) -> Response | None:
        """Reads the text that the page sends, and no other page."""
        if request.method != "POST":
            return _not_allowed("POST", "A text is sent to be read")
        if not _is_of_this_page(request.headers):
            return _text(403, "A text is taken from this viewer's own page alone.")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON:
            return _text(415, f"A text is taken as {JSON} alone.")
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                body = await _body(request)
        except (TimeoutError, ClientDisconnect):
            return _text(408, "The text did not arrive in time; send it again.")
        if body is None:
            return _text(413, too_long("too many"))
        return await self._worked(request, lambda: self._answered(lambda: readings.read(body)))

    async def _data(self, request: Request, path: str) -> Response | None:
        query = request.scope["query_string"].decode("latin-1")
        compressed = _takes_gzip(request)
        return await self._worked(
            request, lambda: self._answered(lambda: self._answers.answer(path, query), compressed)
        )

    async def _worked(self, request: Request, work: Callable[[], Response]) -> Response | None:
        """The result of a worker; None, and no work, once nobody waits for it."""
        future = self._workers.submit(work)
        if future is None:
            return self._refused()
        waiting = asyncio.wrap_future(future)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.cancelled():
                return self._refused()
            return waiting.result() if waiting.done() else None
        finally:
            gone.cancel()
            self._workers.cancel(future)
            waiting.cancel()

    def _refused(self) -> Response:
        if self._workers.closed:  # as the page says where nobody responds
            return _text(503, "The server has ended: run regard view again.")
        return _text(503, "Too many requests are waiting; try again in a second.")

    def _answered(self, ask: Callable[[], Answer], compressed: bool = False) -> Response:
        try:
            answer = ask()
        except MemoryError:
            answer = Answer(503, TEXT, b"There is too little memory to answer this.")
        except Exception as error:
            traceback.print_exc()
            answer = Answer(500, TEXT, f"{type(error).__name__}: {error}".encode())
        headers = {"Regard-Coverage": f"{answer.coverage:.6g}"}
        body = answer.body
        if compressed and answer.media_type == JSON and len(body) >= MIN_COMPRESSED_BYTES:
            body = _compressed(body)
            headers |= GZIP
        return Response(body, answer.status, headers, answer.media_type)


def _takes_gzip(request: Request) -> bool:
    accepted = request.headers.get("accept-encoding", "")
    return "gzip" in (name.strip() for name in accepted.lower().split(","))


def _compressed(body: bytes) -> bytes:
    return gzip.compress(body, 5, mtime=0)


_compressed_file = functools.cache(_compressed)  # each is compressed when it is first requested


def _is_of_this_page(headers: Headers) -> bool:
    """Whether a browser says that the viewer's own page sends this; ``Host`` is checked before."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    own = f"http://{headers['host']}"
    if site is None:  # an older browser, or a program
        return origin == own
    return site == "same-origin" and origin in (None, own)


async def _body(request: Request) -> bytes | None:
    """The body of a request; None where it is too long to hold a text."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            return None
    return body


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@functools.cache
def page_files() -> dict[str, tuple[bytes, str]]:
    """The files of the page with their media types, by path: nothing else can be read.

    All modules come as one, and all style sheets, so that the page loads each in one request. They
    are read once: every viewer of a process serves the same.
    """
    found = {}
    for path, file in page_paths().items():
        ending = path[path.rfind(".") :]
        if ending in MEDIA_TYPES:
            found[path] = file.read_bytes(), MEDIA_TYPES[ending]
    found["boot.js"] = bundle("boot").encode(), MEDIA_TYPES[".js"]
    found["style.css"] = style_sheet().encode(), MEDIA_TYPES[".css"]
    return found


def _not_allowed(methods: str, sentence: str) -> Response:
    refused = _text(405, f"{sentence}; {methods.replace(', ', ' and ')} work.")
    refused.headers["Allow"] = methods
    return refused


def _text(status: int, sentence: str) -> Response:
    return Response(sentence + "\n", status, media_type=TEXT)
