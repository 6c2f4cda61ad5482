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
FREE_CHUNKS = 64  # in one read
CHUNK_PAUSE_SECONDS = 0.00005
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.0005, 0.05
LINGER_BYTES = 64 * 1024 * 1024
LINGER_SECONDS = 5.0
MAX_DRAINING = 4  # reads of unwanted input at a time, over all connections
DRAIN_PAUSE_SECONDS = 0.004  # few, large reads: each one wakes Python beside a call
_HANGUP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR

_draining = threading.BoundedSemaphore(MAX_DRAINING)
_scratch = bytearray(1024 * 1024)  # shared: what is drained into it is never looked at


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds a client may take, each for the whole of its part."""

    idle: float = 30.0  # until the first byte of the next request
    head: float = 10.0  # from that byte to the end of the head
    body: float = 20.0  # from the head to the end of the body
    answer: float = 20.0  # to take the answer


class Connection:
    """The socket of one client, used by its one handler thread.

    `waiting_since` is when it began to wait for a head or to linger; the acceptor may
    evict it then, and at no other time. `slow_since` is when it began to receive a
    body or to send an answer, while it holds a slot that others may want. Both are
    None otherwise. `started_at` is when the first byte of the request was here.
    """

    def __init__(self, sock: socket.socket, deadlines: Deadlines) -> None:
        self.started_at = time.monotonic()
        self.waiting_since: float | None = self.started_at
        self.slow_since: float | None = None
        # Fact: with a timeout set, the socket module polls before each recv and send,
        # and setting it is one more call: three turns of the GIL instead of one or two,
        # each taken from a call that launches kernels. So: polled by hand.
        sock.setblocking(False)
        self._sock = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._deadlines = deadlines
        self._buffer = bytearray()
        self._pause = 0.0
        self._state = threading.Lock()  # between the handler, evict and hurry
        self._slow_side = socket.SHUT_RD
        self._is_evicted = False
        self._is_hurried = False

    def read_head(self) -> RequestHead | None:
        """The next request's head; None when the client closed or stayed idle.

        Raises the ServiceError to answer when what arrived is not a head.
        """
        self.waiting_since = self.started_at = time.monotonic()
        try:
            block = self._read_block()
        except OSError:
            block = None
        finally:
            with self._state:
                self.waiting_since = None
        return None if block is None or self._is_evicted else parse_head(block)

    def _read_block(self) -> bytes | None:
        deadline = self.started_at + self._deadlines.idle
        started = may_skip = False
        while True:
            if not may_skip and len(self._buffer) >= 2:
                may_skip = True
                if self._buffer.startswith(b"\r\n"):  # RFC 9112 2.2: one may precede
                    del self._buffer[:2]
            if self._buffer and not started:
                started = True
                self.started_at = time.monotonic()
                deadline = self.started_at + self._deadlines.head
            end = self._buffer.find(b"\r\n\r\n")
            if end >= 0:
                block = bytes(self._buffer[:end])
                del self._buffer[: end + 4]
                return block
            check_partial_head(self._buffer)
            if not self._receive_head(deadline, started):
                return None

    def _receive_head(self, deadline: float, started: bool) -> bool:
        try:
            if self._receive(deadline):
                return True
        except TimeoutError:
            if started:
                raise RequestTimeout("the head did not arrive in time") from None
            return False
        if started and not self._is_evicted:
            raise BadRequest("the connection ended inside the head")
        return False

    def read_body(self, length: int | None, max_body_bytes: int) -> bytes:
        """The whole body: `length` bytes, or chunked when None, under the cap."""
        deadline = self._begin_slow_part(socket.SHUT_RD) + self._deadlines.body
        try:
            if length is None:
                return self._read_chunked(max_body_bytes, deadline)
            while len(self._buffer) < length:
                self._receive_or_refuse(deadline)
        except TimeoutError:
            raise RequestTimeout("the body did not arrive in time") from None
        except OSError:
            raise BadRequest("the connection broke inside the body") from None
        finally:
            self._end_slow_part()
        body = bytes(self._buffer[:length])
        del self._buffer[:length]
        return body

    def _read_chunked(self, max_body_bytes: int, deadline: float) -> bytes:
        decoder = ChunkedDecoder(max_body_bytes)
        while True:
            data = bytes(self._buffer)
            self._buffer.clear()
            before = decoder.chunks
            decoder.feed(data)
            _pause_for_chunks(decoder.chunks - before)
            if decoder.done:
                self._buffer += decoder.rest
                return bytes(decoder.body)
            self._receive_or_refuse(deadline)

    def _receive_or_refuse(self, deadline: float) -> None:
        if self._receive(deadline):
            return
        if self._is_hurried:
            raise RequestTimeout("the body came slowly while others waited for a slot")
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
        if not self._readable.poll(remaining * 1000):
            raise TimeoutError
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:  # poll may be wrong about one packet (man 2 select)
            return True
        self._buffer += data
        self._lengthen_pause(len(data))
        return bool(data)

    def _lengthen_pause(self, received: int) -> None:
        longer = min(self._pause * 2, LONGEST_PAUSE_SECONDS)
        short = received < SHORT_READ_BYTES
        self._pause = max(longer, SHORTEST_PAUSE_SECONDS) if short else 0.0

    def send(self, data: bytes) -> bool:
        """Send all of an answer in one write; False when the client did not take it."""
        self._pause = 0.0
        deadline = self._begin_slow_part(socket.SHUT_RDWR) + self._deadlines.answer
        try:
            self._send_all(data, deadline)
        except OSError:
            return False
        finally:
            self._end_slow_part()
        return True

    def _send_all(self, data: bytes, deadline: float) -> None:
        """One write when the kernel has room for all of it; TimeoutError when late."""
        rest = memoryview(data)
        while True:
            with contextlib.suppress(BlockingIOError):
                rest = rest[self._sock.send(rest) :]
            if not rest:
                return
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not poll.poll(remaining * 1000):
                raise TimeoutError

    def _begin_slow_part(self, side: int) -> float:
        self._slow_side = side
        self.slow_since = now = time.monotonic()
        return now

    def _end_slow_part(self) -> None:
        with self._state:
            self.slow_since = None

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
        """End a connection that waits or lingers; from the acceptor.

        The lock makes sure that no request is cut that has just been read.
        """
        with self._state:
            if self.waiting_since is not None:
                self._is_evicted = True
                self._shut(socket.SHUT_RDWR)

    def hurry(self) -> None:
        """End a body that is still coming (it gets a 408) or an answer nobody takes."""
        with self._state:
            if self.slow_since is not None and not self._is_hurried:
                self._is_hurried = True
                self._shut(self._slow_side)

    def _shut(self, how: int) -> None:
        with contextlib.suppress(OSError):  # ENOTCONN: the client was faster
            self._sock.shutdown(how)

    def linger(self) -> None:
        """Half-close, then drop what the client still sends, within bounds."""
        self.waiting_since = time.monotonic()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            self._drain(self.waiting_since + LINGER_SECONDS)

    def _drain(self, deadline: float) -> None:
        """Read few at a time; a silent client waits in poll and takes no place."""
        dropped = 0
        while dropped < LINGER_BYTES:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not self._readable.poll(remaining * 1000):
                return
            with _draining:
                received = self._sock.recv_into(_scratch)  # never blocks: poll said so
                if not received:
                    return
                time.sleep(DRAIN_PAUSE_SECONDS)
            dropped += received
            self._lengthen_pause(received)
            time.sleep(self._pause)


def _pause_for_chunks(count: int) -> None:
    """Wait 50 us for each small chunk: thousands in one read are drips, too."""
    if count > FREE_CHUNKS:
        time.sleep((count - FREE_CHUNKS) * CHUNK_PAUSE_SECONDS)
