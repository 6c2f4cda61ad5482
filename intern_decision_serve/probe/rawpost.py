"""One POST sent by hand: head first, body later or never, closed at any time.

For what a well-behaved client cannot do: hold a place in the queue, or walk away.
"""

from __future__ import annotations

import http.client
import json

from .client import Answer, Tally, decode
from .rows import Document
from .wire import Target, open_socket

__all__ = ["RawPost"]


class RawPost:
    """A connection of its own for one POST; every socket step has the same timeout."""

    def __init__(
        self, target: Target, token: str, path: str, body: Document, seconds: float
    ) -> None:
        self._body = json.dumps(body).encode()
        self._head = (
            f"POST {target.prefix}{path} HTTP/1.1\r\n"
            f"Host: {target.host}:{target.port}\r\n"
            f"Authorization: Bearer {token}\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(self._body)}\r\n\r\n"
        ).encode()
        self._sock = open_socket(target, seconds)
        self._sock.settimeout(seconds)

    def send_head(self) -> None:
        """Ask for a place; the body stays here."""
        self._sock.sendall(self._head)

    def send_body(self) -> None:
        """Send the rest."""
        self._sock.sendall(self._body)

    def read(
        self, tally: Tally, *, expected: tuple[int, ...], seconds: float
    ) -> Answer:
        """The answer, or the failure to get one in time; counted like any other."""
        try:
            self._sock.settimeout(seconds)
            response = http.client.HTTPResponse(self._sock, method="POST")
            response.begin()
            raw = response.read()
            names = {name.lower(): value for name, value in response.getheaders()}
            answer = Answer(response.status, names, decode(raw), 0.0)
        except (OSError, http.client.HTTPException) as error:
            answer = Answer(0, {}, None, 0.0, type(error).__name__)
        tally.add(answer, expected=answer.status in expected)
        return answer

    def close(self) -> None:
        """Walk away."""
        self._sock.close()
