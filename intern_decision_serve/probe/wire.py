"""The socket under a client: where the server is, and one deadline per request.

It speaks no HTTP of its own: http.client does, over a socket whose every step gets only
what is left of the deadline, however slowly bytes trickle.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import io
import select
import socket
import ssl
import time
import urllib.parse
from dataclasses import dataclass

__all__ = [
    "MOST_ANSWER_BYTES",
    "Connection",
    "DeadlineSocket",
    "NoDescriptors",
    "Target",
    "TooLarge",
    "open_socket",
    "parse_target",
]

MOST_ANSWER_BYTES = 32 * 2**20  # head and body; thousands of results fit


class TooLarge(http.client.HTTPException):
    """Raised when an answer is larger than any that is read."""


class NoDescriptors(OSError):
    """Raised when this machine has no more descriptors: no fault of the server."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the server listens; `prefix` is a path in front of the endpoints."""

    scheme: str
    host: str
    port: int
    prefix: str

    @property
    def authority(self) -> str:
        """Host and port, as a URL and the Host header spell them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The address a report may show."""
        return f"{self.scheme}://{self.authority}{self.prefix}"


def parse_target(url: str) -> Target:
    """Read an http or https URL; ValueError says which rule it breaks."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an http:// or https:// address")
    if parts.username is not None or parts.password is not None:
        raise ValueError("the address must carry no user or password")
    if parts.query or parts.fragment:
        raise ValueError(f"{url!r} must end with the host, the port or a path")
    if parts.port == 0:
        raise ValueError(f"{url!r} must name a port from 1 on, or none")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return Target(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))


class _DeadlineReader(io.RawIOBase):
    """Reads a socket under the deadline of its owner, however slowly bytes trickle.

    http.client closes the socket before the body is read when the server will: the file
    made of the socket keeps it open until this reader closes, as a real one would.
    """

    def __init__(self, owner: DeadlineSocket) -> None:
        self._owner = owner
        self._held = owner.sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        got = self._owner.limited().recv_into(buffer)
        self._owner.take(got)
        return got

    def close(self) -> None:
        self._held.close()
        super().close()


class DeadlineSocket:
    """The part of a socket that http.client uses, limited for each request.

    One deadline for all its steps, and one number of bytes for its answer: http.client
    reads a chunk of size -1, or one `100 Continue` after the other, to the end.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.renew(deadline)

    def renew(self, deadline: float) -> None:
        """Start the next request."""
        self._deadline = deadline
        self._room_bytes = MOST_ANSWER_BYTES

    def take(self, count: int) -> None:
        """Count bytes of the answer; TooLarge past the most that is read."""
        self._room_bytes -= count
        if self._room_bytes < 0:
            raise TooLarge(f"over {MOST_ANSWER_BYTES} bytes")

    def limited(self) -> socket.socket:
        """The socket with what is left of the deadline as its timeout."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline passed")
        self.sock.settimeout(min(left, 3600.0))
        return self.sock

    def sendall(self, data: bytes) -> None:
        self.limited().sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_DeadlineReader(self))

    def close(self) -> None:
        self.sock.close()


def open_socket(target: Target, seconds: float) -> socket.socket:
    """Connect within `seconds`, TLS included, with Nagle's algorithm off.

    OSError where the server does not let us, NoDescriptors where this machine does not.
    """
    try:
        sock = socket.create_connection((target.host, target.port), timeout=seconds)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise NoDescriptors(f"{error.strerror}: raise `ulimit -n`") from None
        raise
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if target.scheme == "https":
        context = ssl.create_default_context()
        return context.wrap_socket(sock, server_hostname=target.host)
    return sock


class Connection(http.client.HTTPConnection):
    """http.client's protocol over a socket with a deadline."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.host, target.port)
        self._target = target
        self._deadline = float("inf")
        self._limited: DeadlineSocket | None = None

    def connect(self) -> None:
        """Called by http.client before it sends, where no connection is open."""
        seconds = max(self._deadline - time.monotonic(), 0.001)
        sock = open_socket(self._target, min(seconds, 3600.0))
        self.sock = self._limited = DeadlineSocket(sock, self._deadline)

    def close(self) -> None:
        self._limited = None
        super().close()

    def abort(self) -> None:
        """Wake whoever waits for this socket."""
        limited = self._limited
        if limited is not None:
            with contextlib.suppress(OSError):
                limited.sock.shutdown(socket.SHUT_RDWR)

    def renew(self, deadline: float) -> None:
        """Set the next request's deadline; drop a connection the server has closed.

        Looking before sending is not a retry: nothing was asked yet.
        """
        self._deadline = deadline
        if self._limited is None:
            return
        poll = select.poll()  # select() knows no descriptor from 1024 on
        poll.register(self._limited.sock, select.POLLIN)
        if poll.poll(0):
            self.close()
        else:
            self._limited.renew(deadline)
