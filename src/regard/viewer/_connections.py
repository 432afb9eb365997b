"""Connections to the viewer: none that asks nothing keeps out who does."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

READING_SECONDS = 10.0  # for a whole question, however slowly it comes
MOST_CONNECTIONS = 256  # a browser opens six
QUEUE = 1024  # connections that the system holds until they are taken
TAKEN_AT_ONCE = 16  # of them; each takes a file descriptor before it can be counted


def most_connections() -> int:
    """How many are kept open: a quarter of the files that this process may open, at most 256."""
    if sys.platform == "win32":
        return MOST_CONNECTIONS
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(TAKEN_AT_ONCE, soft // 4))


class Connection(H11Protocol):
    """A connection that is closed when no question comes in time, or another needs its place.

    A question is under way from the end of its headers until its answer is given. Between them a
    connection is idle; where there are too many, the one that was idle longest goes.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._end: asyncio.TimerHandle | None = None  # while it is idle

    def connection_made(self, transport: Any) -> None:
        """Makes room for it."""
        super().connection_made(transport)
        self._look()
        if len(self.connections) > most_connections():
            idle = (found for found in self.connections if isinstance(found, Connection))
            ends = {found: found._end.when() for found in idle if found._end is not None}
            min(ends, key=ends.__getitem__, default=self)._leave()

    def data_received(self, data: bytes) -> None:
        """Reads on; what comes late or slowly does not move the end."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Waits for the next question."""
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clock."""
        super().connection_lost(exc)
        self._stop()

    def _look(self) -> None:
        is_asked = self.cycle is not None and not self.cycle.response_complete
        if is_asked or self.transport.is_closing():
            self._stop()
        elif self._end is None:
            self._end = self.loop.call_later(READING_SECONDS, self._leave)

    def _leave(self) -> None:
        self._stop()
        self.transport.close()

    def _stop(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None


class Server(uvicorn.Server):
    """A server that takes waiting connections in small portions, and holds a longer queue."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen."""
        await super().startup(sockets)
        for bound in sockets or []:
            bound.listen(QUEUE)
