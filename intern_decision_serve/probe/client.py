"""One HTTP client of a server under measurement: keep-alive, one deadline, no retry.

It owns what an answer is and that each one is counted in the `Tally` it was given. It
never follows a redirect, never asks twice, never reads a proxy setting, and never turns
an answer it dislikes into silence.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .foreign import decode, without_token
from .wire import MOST_ANSWER_BYTES, Connection, Target, TooLarge

__all__ = ["FAILURES", "Answer", "Client", "Tally", "read_answer"]

# What reading an answer may raise; http.client lets ValueError out of a bad chunk.
FAILURES = (OSError, http.client.HTTPException, ValueError)
_PIECE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got; `status` 0 means no answer, and `failure` says why."""

    status: int
    headers: Mapping[str, str]
    document: object
    seconds: float
    failure: str = ""

    @property
    def code(self) -> str:
        """The error envelope's code, the failure, or "" for anything else."""
        if self.failure:
            return self.failure
        error = self.document.get("error") if isinstance(self.document, dict) else None
        code = error.get("code") if isinstance(error, dict) else None
        return code if isinstance(code, str) else ""

    @property
    def named(self) -> str:
        """Status and code in one phrase, as reports show it."""
        return f"{self.status or 'no answer'} {self.code}".strip()

    @property
    def instead(self) -> str:
        """What came instead of a 200 with a JSON object, in words."""
        return f"{self.named}{' without a JSON object' * (self.status == 200)}"


@dataclass(slots=True)
class Tally:
    """Counts every answer by section; safe to share between threads."""

    section: str = ""
    counts: dict[tuple[str, str, bool], int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, answer: Answer, *, expected: bool) -> None:
        """Count one answer, as one the section asked for or one it did not."""
        with self._lock:
            key = (self.section, answer.named, expected)
            self.counts[key] = self.counts.get(key, 0) + 1

    def unexpected(self) -> int:
        """The number of answers that no section asked for."""
        with self._lock:
            return sum(n for (_, _, expected), n in self.counts.items() if not expected)


class Client:
    """One connection to the server; used by one thread at a time."""

    def __init__(
        self, target: Target, token: str, tally: Tally, *, deadline: float
    ) -> None:
        self._target = target
        self._token = token
        self._tally = tally
        self._deadline = deadline
        self._connection = Connection(target)
        self._aborted = False

    def get(self, path: str, *, expected: Iterable[int] = (200,)) -> Answer:
        """GET without a token."""
        return self._send("GET", path, None, {}, expected)

    def post(
        self,
        path: str,
        body: object,
        *,
        authorization: str | None = "",
        expected: Iterable[int] = (200,),
    ) -> Answer:
        """POST a JSON value, or bytes and byte chunks as they are.

        `authorization` "" is the right bearer, None is no header. Chunks are sent with
        Transfer-Encoding: chunked.
        """
        headers = {"Content-Type": "application/json"}
        if authorization == "":
            authorization = f"Bearer {self._token}"
        if authorization is not None:
            headers["Authorization"] = authorization
        if isinstance(body, dict):
            body = json.dumps(body).encode()
        return self._send("POST", path, body, headers, expected)

    def request(self, method: str, path: str, *, expected: Iterable[int]) -> Answer:
        """Any method without a body, with the token."""
        headers = {"Authorization": f"Bearer {self._token}"}
        return self._send(method, path, None, headers, expected)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection."""
        self._connection.close()

    def abort(self) -> None:
        """End a request under way, from another thread; what it gets is not counted."""
        self._aborted = True
        self._connection.abort()

    def _send(
        self,
        method: str,
        path: str,
        body: object,
        headers: Mapping[str, str],
        expected: Iterable[int],
    ) -> Answer:
        started = time.monotonic()
        try:
            answer = self._exchange(method, path, body, headers, started)
        except FAILURES as error:
            self._connection.close()
            failure = type(error).__name__
            answer = Answer(0, {}, None, time.monotonic() - started, failure)
        if not self._aborted:
            self._tally.add(answer, expected=answer.status in expected)
        return answer

    def _exchange(
        self,
        method: str,
        path: str,
        body: object,
        headers: Mapping[str, str],
        started: float,
    ) -> Answer:
        connection = self._connection
        connection.renew(started + self._deadline)
        broken = None
        try:
            connection.request(
                method,
                self._target.prefix + path,
                body=body,  # type: ignore[arg-type]
                headers=headers,
            )
        except (BrokenPipeError, ConnectionResetError) as error:
            broken = error  # an early refusal may be waiting behind the closed door
        if broken is not None and connection.sock is None:
            raise broken
        response = connection.getresponse()
        answer = read_answer(response, started, self._token)
        if response.will_close:
            connection.close()
        return answer


def read_answer(
    response: http.client.HTTPResponse, started: float, token: str
) -> Answer:
    """The whole answer, seconds counted from `started`; one of FAILURES for a part.

    An echo of the token is blotted out here, so that nothing after can pass it on.
    Read in pieces: a read of the declared length would allocate it first.
    """
    if (response.length or 0) > MOST_ANSWER_BYTES:
        raise TooLarge(f"{response.length} bytes")
    raw = b"".join(iter(lambda: response.read(_PIECE_BYTES), b""))
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    seconds = time.monotonic() - started
    names = {
        name.lower(): without_token(value, token)
        for name, value in response.getheaders()
    }
    return Answer(response.status, names, decode(raw, token), seconds)
