"""Connections to the viewer: idle ones cannot lock others out."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_TIMEOUT_S = 10.0  # for a whole request, however slowly it comes
MAX_CONNECTIONS = 256  # a browser opens six
BACKLOG = 1024  # connections that the system holds until they are accepted
ACCEPT_BATCH = 16  # each takes a file descriptor before it can be counted


def max_connections() -> int:
    """How many are kept open: a quarter of the files that this process may open, at most 256."""
    if sys.platform == "win32":
        return MAX_CONNECTIONS
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(ACCEPT_BATCH, soft // 4))


class Connection(H11Protocol):
    """A connection that is closed where no request comes in time, or where there are too many.

    A request is in progress from the end of its headers to the end of its response. Otherwise the
    connection is idle; where there are too many, the one that was idle longest is closed.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._timer: asyncio.TimerHandle | None = None  # while it is idle

    def connection_made(self, transport: Any) -> None:
        """Closes the longest idle connection where there are too many."""
        super().connection_made(transport)
        self._update_timer()
        if len(self.connections) > max_connections():
            idle = (found for found in self.connections if isinstance(found, Connection))
            ends = {found: found._timer.when() for found in idle if found._timer is not None}
            min(ends, key=ends.__getitem__, default=self)._time_out()

    def data_received(self, data: bytes) -> None:
        """Reads on; data that comes late or slowly does not restart the timer."""
        super().data_received(data)
        self._update_timer()

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        super().on_response_complete()
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer."""
        super().connection_lost(exc)
        self._stop_timer()

    def _update_timer(self) -> None:
        has_request = self.cycle is not None and not self.cycle.response_complete
        if has_request or self.transport.is_closing():
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(REQUEST_TIMEOUT_S, self._time_out)

    def _time_out(self) -> None:
        self._stop_timer()
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """A server that accepts connections in small batches, with a longer backlog."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen."""
        await super().startup(sockets)
        for bound in sockets or []:
            bound.listen(BACKLOG)
