"""One client's socket: buffered reads under deadlines, whole answers, a kind close.

Every wait has an end: for the first byte of a request, for its head, for its body, for
the client to take the answer. It must never read past a request it cannot frame, and
never close on unread input without draining it: the kernel would send a reset, and the
client would lose the answer it was about to read.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from dataclasses import dataclass

from .errors import BadRequest, RequestTimeout
from .framing import ChunkedDecoder, RequestHead, check_partial_head, parse_head

__all__ = ["Connection", "Deadlines"]

RECEIVE_BYTES = 64 * 1024
SHORT_READ_BYTES = 1024
LONGEST_PAUSE_SECONDS = 0.05
LINGER_BYTES = 64 * 1024 * 1024
LINGER_SECONDS = 5.0
MAX_LINGERING = 8  # connections drained at a time; the others wait half-closed
_HANGUP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR

_lingering = threading.BoundedSemaphore(MAX_LINGERING)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds a client may take, each for the whole of its part."""

    idle: float = 30.0  # until the first byte of the next request
    head: float = 10.0  # from that byte to the end of the head
    body: float = 20.0  # from the head to the end of the body
    answer: float = 20.0  # to take the answer


class Connection:
    """The socket of one client, used by its one handler thread.

    `waiting_since` is when it began to wait for a head, or None while a request is
    being answered: the acceptor may evict a waiting connection, never a busy one.
    """

    def __init__(self, sock: socket.socket, deadlines: Deadlines) -> None:
        self.waiting_since: float | None = time.monotonic()
        self._sock = sock
        self._deadlines = deadlines
        self._buffer = bytearray()
        self._pause = 0.0

    def read_head(self) -> RequestHead | None:
        """The next request's head; None when the client closed or stayed idle.

        Raises the ServiceError to answer when what arrived is not a head.
        """
        now = self.waiting_since = time.monotonic()
        deadline = now + self._deadlines.idle
        started = False
        try:
            while True:
                if self._buffer[:2] == b"\r\n":  # RFC 9112 2.2: one may precede
                    del self._buffer[:2]
                if self._buffer and not started:
                    started = True
                    deadline = time.monotonic() + self._deadlines.head
                end = self._buffer.find(b"\r\n\r\n")
                if end >= 0:
                    return self._take_head(end)
                check_partial_head(self._buffer)
                if not self._receive(deadline):
                    return None
        except TimeoutError:
            if not started:
                return None
            raise RequestTimeout("the request head did not arrive in time") from None
        except OSError:
            return None
        finally:
            self.waiting_since = None

    def _take_head(self, end: int) -> RequestHead:
        block = bytes(self._buffer[:end])
        del self._buffer[: end + 4]
        return parse_head(block)

    def read_body(self, length: int | None, max_body_bytes: int) -> bytes:
        """The whole body: `length` bytes, or chunked when None, under the cap."""
        deadline = time.monotonic() + self._deadlines.body
        try:
            if length is None:
                return self._read_chunked(max_body_bytes, deadline)
            while len(self._buffer) < length:
                self._receive_or_refuse(deadline)
        except TimeoutError:
            raise RequestTimeout("the body did not arrive in time") from None
        except OSError:
            raise BadRequest("the connection broke inside the body") from None
        body = bytes(self._buffer[:length])
        del self._buffer[:length]
        return body

    def _read_chunked(self, max_body_bytes: int, deadline: float) -> bytes:
        decoder = ChunkedDecoder(max_body_bytes)
        while True:
            data = bytes(self._buffer)
            self._buffer.clear()
            decoder.feed(data)
            if decoder.done:
                self._buffer += decoder.rest
                return bytes(decoder.body)
            self._receive_or_refuse(deadline)

    def _receive_or_refuse(self, deadline: float) -> None:
        if not self._receive(deadline):
            raise BadRequest("the body is shorter than declared")

    def _receive(self, deadline: float) -> bool:
        """Read once into the buffer; False at end-of-file, TimeoutError when late.

        A client that drips bytes would buy one wake-up of Python for each: every short
        read doubles a pause before the next, up to 50 ms.
        """
        if self._pause:
            time.sleep(self._pause)
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self._sock.settimeout(remaining)
        data = self._sock.recv(RECEIVE_BYTES)
        self._buffer += data
        if len(data) < SHORT_READ_BYTES:
            self._pause = min(max(self._pause * 2, 0.0005), LONGEST_PAUSE_SECONDS)
        return bool(data)

    def send(self, data: bytes) -> bool:
        """Send all of an answer in one write; False when the client did not take it."""
        self._pause = 0.0
        try:
            self._sock.settimeout(self._deadlines.answer)
            self._sock.sendall(data)
        except OSError:
            return False
        return True

    @property
    def has_input(self) -> bool:
        """Whether bytes of the client are here already."""
        return bool(self._buffer)

    def is_gone(self) -> bool:
        """Whether the client closed its side or broke; safe from any thread.

        A half-close counts: nothing tells it from a close (documented).
        """
        try:
            poll = select.poll()
            poll.register(self._sock, _HANGUP)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    def evict(self) -> None:
        """Wake the handler with end-of-file; from the acceptor."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def linger(self) -> None:
        """Half-close, then drop what the client still sends, within bounds.

        What the kernel holds waits there without a reset until a place is free.
        """
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            if _lingering.acquire(timeout=LINGER_SECONDS):
                try:
                    self._drain()
                finally:
                    _lingering.release()

    def _drain(self) -> None:
        deadline = time.monotonic() + LINGER_SECONDS
        scratch = bytearray(1024 * 1024)
        dropped = 0
        while dropped < LINGER_BYTES:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self._sock.settimeout(remaining)
            received = self._sock.recv_into(scratch)
            if not received:
                return
            dropped += received
            time.sleep(0.002)  # few, large reads: each one wakes Python beside a call
