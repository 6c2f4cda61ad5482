"""One POST sent by hand: head first, body later or never, closed at any time.

For what a well-behaved client cannot do: hold a place in the queue, or walk away.
"""

from __future__ import annotations

import http.client
import json
import time

from .client import FAILURES, Answer, Tally, read_answer
from .rows import Document
from .wire import DeadlineSocket, NoDescriptors, Target, open_socket

__all__ = ["RawPost"]

_GRACE_SECONDS = 0.2  # an answer that came in time may be looked at late


class RawPost:
    """A connection of its own for one POST; what breaks on the way, `read` tells."""

    def __init__(
        self, target: Target, token: str, path: str, body: Document, seconds: float
    ) -> None:
        """Connect within `seconds`; NoDescriptors is all that is raised."""
        self._body = json.dumps(body).encode()
        self._head = (
            f"POST {target.prefix}{path} HTTP/1.1\r\n"
            f"Host: {target.authority}\r\n"
            f"Authorization: Bearer {token}\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(self._body)}\r\n\r\n"
        ).encode()
        self._token = token
        self._seconds = seconds
        self._failure = ""
        self._sent = time.monotonic()
        self._sock: DeadlineSocket | None = None
        try:
            sock = open_socket(target, seconds)
            self._sock = DeadlineSocket(sock, self._sent + seconds)
        except NoDescriptors:
            raise
        except OSError as error:
            self._failure = type(error).__name__

    def send_head(self) -> None:
        """Ask for a place; the body stays here."""
        self._send(self._head)

    def send_body(self) -> None:
        """Send the rest."""
        self._send(self._body)

    def _send(self, data: bytes) -> None:
        """An early refusal may be waiting behind a door that closed: it is read yet."""
        self._sent = time.monotonic()
        if self._sock is not None:
            self._sock.renew(self._sent + self._seconds)
            try:
                self._sock.sendall(data)
            except OSError as error:
                self._failure = type(error).__name__

    def read(
        self, tally: Tally, *, expected: tuple[int, ...], seconds: float
    ) -> Answer:
        """The answer, or the failure to get one; counted like any other.

        It must be whole within `seconds` of what was sent last, however many are read
        before this one.
        """
        answer = self._answer(seconds)
        tally.add(answer, expected=answer.status in expected)
        return answer

    def _answer(self, seconds: float) -> Answer:
        started = time.monotonic()
        if self._sock is None:
            return Answer(0, {}, None, 0.0, self._failure)
        self._sock.renew(max(self._sent + seconds, started + _GRACE_SECONDS))
        response = http.client.HTTPResponse(
            self._sock,  # type: ignore[arg-type]
            method="POST",
        )
        try:
            response.begin()
            return read_answer(response, started, self._token)
        except FAILURES as error:
            failure = self._failure or type(error).__name__
            return Answer(0, {}, None, time.monotonic() - started, failure)
        finally:
            response.close()

    def close(self) -> None:
        """Walk away."""
        if self._sock is not None:
            self._sock.close()
