"""The listener: one thread a connection, bounded and paced, over the stdlib's server.

    accept (room? pace) -> handler thread -> Exchange, Exchange, ... -> close

It binds at once, so that a taken port is told at once, and listens after the last
startup check. What one request gets is `exchange`'s: it must never read or write a byte
itself.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Iterable
from http.server import ThreadingHTTPServer
from operator import itemgetter
from typing import Any

from .accesslog import AccessLog
from .admission import Admission
from .connection import Connection, Deadlines
from .exchange import Exchange
from .handlers import Api
from .pacing import Pace
from .worker import Worker

__all__ = ["BACKLOG", "MAX_CONNECTIONS", "Server"]

_log = logging.getLogger(__name__)

BACKLOG = 1024  # connects beyond it would be reset; the kernel caps it at somaxconn
MAX_CONNECTIONS = 512  # over it they wait in the backlog
EVICT_AFTER_SECONDS = 1.0  # who waits or lingers so long makes room, where it is short
HURRY_AFTER_SECONDS = 3.0  # who sends or takes so slowly does, where a slot is wanted
LOOK_AGAIN_SECONDS = 0.1
ACCEPTS_A_SECOND, ACCEPT_BURST = 200, 256
REFUSALS_A_SECOND, DOCUMENTS_A_SECOND, ANSWER_BURST = 100, 100, 32


class ConnectionThread(socketserver.BaseRequestHandler):
    """Runs a connection's exchanges, one after the other."""

    server: Server

    def handle(self) -> None:
        """Answer requests until one side wants to close."""
        connection = self.server.connection_of(self.request)
        while Exchange(self.server, connection).run():
            pass


class Server(ThreadingHTTPServer):
    """One thread a connection, bounded; binds at once, listens when told to."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = BACKLOG

    def __init__(
        self,
        address: tuple[str, int],
        *,
        token: str,
        max_body_bytes: int,
        worker: Worker,
        admission: Admission,
        access_log: AccessLog,
        inherited: socket.socket | None = None,
        deadlines: Deadlines | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        if inherited is not None:
            # TCPServer makes a socket whatever comes; the sealed unit allows only this
            self.address_family = socket.AF_UNIX
        elif ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, ConnectionThread, bind_and_activate=False)
        self.token = token
        self.max_body_bytes = max_body_bytes
        self.worker = worker
        self.admission = admission
        self.access_log = access_log
        self.deadlines = deadlines or Deadlines()
        self._api: Api | None = None
        self._accepts = self._pace(ACCEPTS_A_SECOND, ACCEPT_BURST)
        self.strangers = self._pace(REFUSALS_A_SECOND, ANSWER_BURST)
        self.refusals = self._pace(REFUSALS_A_SECOND, ANSWER_BURST)
        self.documents = self._pace(DOCUMENTS_A_SECOND, ANSWER_BURST)
        self._max_connections = max_connections
        self._open = threading.Condition()
        self._connections: dict[socket.socket, Connection] = {}
        self._is_closing = False
        self._inherit_or_bind(inherited)

    def _pace(self, rate: float, burst: int) -> Pace:
        return Pace(rate, burst, is_scoring=lambda: self.worker.is_scoring)

    def _inherit_or_bind(self, inherited: socket.socket | None) -> None:
        if inherited is not None:
            self.socket.close()
            self.socket = inherited
            self.server_address = inherited.getsockname()
            return
        try:
            self.server_bind()
        except OSError:
            self.server_close()
            raise

    def server_bind(self) -> None:
        """Bind without HTTPServer's look-up of the host's name (DNS)."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def serve(self, api: Api) -> None:
        """Serve until `shutdown`; listen first, after the last startup check."""
        self._api = api
        self.serve_forever(poll_interval=0.2)

    @property
    def api(self) -> Api:
        """The routes; set before the first connection is accepted."""
        assert self._api is not None
        return self._api

    @property
    def url(self) -> str:
        """The base URL of the bound address."""
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def check_open(self) -> None:
        """Raise ShuttingDown or EngineFailed when no new work is taken."""
        self.worker.check_open()

    def service_actions(self) -> None:
        """Between two accepts, five times a second at least."""
        self.access_log.roll()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept one connection when there is room for it."""
        self._make_room()
        self._accepts.wait()
        try:
            sock, address = super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS):
                self._evict(since=time.monotonic())
                time.sleep(LOOK_AGAIN_SECONDS)  # the listener stays readable
            raise
        with contextlib.suppress(OSError):  # it was reset while it waited
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Count the connection, then give it its thread."""
        with self._open:
            self._connections[request] = Connection(request, self.deadlines)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system has no thread left
            _log.error("no thread for a connection: closing it")
            self.shutdown_request(request)
            time.sleep(LOOK_AGAIN_SECONDS)

    def close_request(self, request: Any) -> None:
        """Forget a connection, close it, and let the acceptor go on."""
        with self._open:
            self._connections.pop(request, None)
            self._open.notify()
        super().close_request(request)

    def shutdown(self) -> None:
        """End `serve`, also where it waits for room."""
        with self._open:
            self._is_closing = True
            self._open.notify()
        super().shutdown()

    def _make_room(self) -> None:
        """Wait below the bound; the connection that waited longest makes room."""
        with self._open:
            while len(self._connections) >= self._max_connections:
                if self._is_closing:
                    raise ConnectionAbortedError("the server is closing")
                self._evict(since=time.monotonic() - EVICT_AFTER_SECONDS)
                self._open.wait(LOOK_AGAIN_SECONDS)

    def _evict(self, since: float) -> None:
        """End one connection that has waited or lingered since then."""
        with self._open:
            longest = _earliest(self._connections.values(), "waiting_since", since)
            if longest is not None:
                longest.evict()

    def hurry_slowest(self) -> None:
        """End the slowest body or answer that holds a slot, if it is slow indeed."""
        since = time.monotonic() - HURRY_AFTER_SECONDS
        with self._open:
            slowest = _earliest(self._connections.values(), "slow_since", since)
            if slowest is not None:
                slowest.hurry()

    def connection_of(self, request: socket.socket) -> Connection:
        """The open connection over a socket."""
        return self._connections[request]

    @property
    def open_connections(self) -> int:
        """How many connections are open now."""
        return len(self._connections)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what escaped a handler thread (socketserver would print it)."""
        _log.exception("a connection's thread met an unexpected failure")


def _earliest(
    connections: Iterable[Connection], attribute: str, since: float
) -> Connection | None:
    """The one whose time is earliest, if it is not after `since`; None has no time."""
    timed = [
        (at, connection)
        for connection in connections
        if (at := getattr(connection, attribute)) is not None and at <= since
    ]
    return min(timed, key=itemgetter(0))[1] if timed else None
