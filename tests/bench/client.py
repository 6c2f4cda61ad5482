"""A client light enough to load a server from the core it leaves free.

Raw sockets and prepared bytes: what it costs is a fraction of what the server does.
"""

from __future__ import annotations

import re
import socket
from urllib.parse import urlsplit

__all__ = ["TOKEN", "Client", "build_request"]

TOKEN = "bench-token-of-at-least-32-characters"
_LENGTH = re.compile(rb"\r\nContent-Length: *(\d+)", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nConnection: *close", re.IGNORECASE)


def build_request(
    path: str, body: bytes = b"", *, token: str = TOKEN, headers: str = ""
) -> bytes:
    """One whole request: a GET without a body, else a POST."""
    if not body:
        return f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"{headers}\r\n"
    )
    return head.encode() + body


class Client:
    """One keep-alive connection, opened again when the server closed it."""

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        address = urlsplit(url)
        self._address = (address.hostname or "", address.port or 80)
        self._timeout = timeout
        self._sock: socket.socket | None = None

    def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send a request; the status and the body of its answer, 0 when cut off."""
        try:
            sock = self._open()
            sock.sendall(request)
            return self._read(sock)
        except OSError:
            self.close()
            return 0, b""

    def _open(self) -> socket.socket:
        if self._sock is None:
            self._sock = socket.create_connection(self._address, self._timeout)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._sock

    def _read(self, sock: socket.socket) -> tuple[int, bytes]:
        received = b""
        while (end := received.find(b"\r\n\r\n")) < 0:
            data = sock.recv(65536)
            if not data:
                raise ConnectionError("closed before an answer")
            received += data
        head, body = received[: end + 2], received[end + 4 :]
        found = _LENGTH.search(head)
        length = int(found[1]) if found else 0
        while len(body) < length:
            data = sock.recv(65536)
            if not data:
                raise ConnectionError("closed inside an answer")
            body += data
        if _CLOSE.search(head):
            self.close()
        return int(head[9:12]), body

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
