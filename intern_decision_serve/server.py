"""The listener: one thread a connection, bounded and paced, over the stdlib's server.

    accept (room? pace) -> handler thread -> Exchange, Exchange, ... -> close

It binds at once, so that a taken port is told at once, and listens after the last
startup check. What one request gets is `exchange`'s: it must never read or write a byte
itself.
"""

from __future__ import annotations

import errno
import logging
import math
import socket
import socketserver
import threading
import time
from http.server import ThreadingHTTPServer
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
EVICT_AFTER_SECONDS = 1.0  # a connection waiting this long for a head may be closed
ACCEPTS_A_SECOND, ACCEPT_BURST = 200, 256
REFUSALS_A_SECOND, DOCUMENTS_A_SECOND, ANSWER_BURST = 100, 200, 32


class ConnectionThread(socketserver.BaseRequestHandler):
    """Runs a connection's exchanges, one after the other."""

    server: Server

    def handle(self) -> None:
        """Answer requests until one side wants to close."""
        connection = Connection(self.request, self.server.deadlines)
        self.server.enter(connection)
        try:
            while Exchange(self.server, connection).run():
                pass
        finally:
            self.server.leave(connection)


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
        if inherited is None and ":" in address[0]:
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
        self.refusals = self._pace(REFUSALS_A_SECOND, ANSWER_BURST)
        self.documents = self._pace(DOCUMENTS_A_SECOND, ANSWER_BURST)
        self._max_connections = max_connections
        self._open = threading.Condition()
        self._connections: set[Connection] = set()
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
        """Listen, and serve until `shutdown`; call after the last startup check."""
        self._api = api
        self.server_activate()
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

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept one connection when there is room for it."""
        self._make_room()
        self._accepts.wait()
        try:
            sock, address = super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS):
                time.sleep(0.05)  # the listener stays readable: do not spin
            raise
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock, address

    def _make_room(self) -> None:
        """Wait below the bound; close the connection that waited longest for a head."""
        with self._open:
            while len(self._connections) >= self._max_connections:
                before = time.monotonic() - EVICT_AFTER_SECONDS
                for connection in sorted(self._connections, key=_waiting_since)[:1]:
                    if _waiting_since(connection) < before:
                        connection.evict()
                self._open.wait(0.1)

    def enter(self, connection: Connection) -> None:
        """Count an open connection."""
        with self._open:
            self._connections.add(connection)

    def leave(self, connection: Connection) -> None:
        """Forget a closed connection and let the acceptor go on."""
        with self._open:
            self._connections.discard(connection)
            self._open.notify()

    @property
    def open_connections(self) -> int:
        """How many connections are open now."""
        return len(self._connections)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what escaped a handler thread (socketserver would print it)."""
        _log.exception("a connection's thread met an unexpected failure")


def _waiting_since(connection: Connection) -> float:
    """When it began to wait for a head; a busy connection sorts last."""
    since = connection.waiting_since
    return math.inf if since is None else since
