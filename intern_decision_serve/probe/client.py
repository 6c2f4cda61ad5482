"""One HTTP client of a server under measurement: keep-alive, one deadline, no retry.

It owns the wire: where the server is, how a request is sent and what came back,
connection failures included. It never follows a redirect, never asks twice, never reads
a proxy setting, and never turns an answer it dislikes into silence: each one is counted
in the `Tally` it was given.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import select
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["Answer", "Client", "Tally", "Target", "open_socket", "parse_target"]

_FAILURES = (OSError, http.client.HTTPException)


@dataclass(frozen=True, slots=True)
class Target:
    """Where the server listens; `prefix` is a path in front of the endpoints."""

    scheme: str
    host: str
    port: int
    prefix: str

    @property
    def url(self) -> str:
        """The address a report may show."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"


def parse_target(url: str) -> Target:
    """Read an http or https URL; ValueError says which rule it breaks."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an http:// or https:// address")
    if parts.username is not None or parts.password is not None:
        raise ValueError("the address must carry no user or password")
    if parts.query or parts.fragment:
        raise ValueError(f"{url!r} must end with the host, the port or a path")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return Target(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))


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


class _DeadlineReader(io.RawIOBase):
    """Reads a socket under the deadline of its owner, however slowly bytes trickle.

    http.client closes the socket before the body is read when the server will: the file
    made of the socket keeps it open until this reader closes, as a real one would.
    """

    def __init__(self, owner: _DeadlineSocket) -> None:
        self._owner = owner
        self._held = owner.sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        return self._owner.limited().recv_into(buffer)

    def close(self) -> None:
        self._held.close()
        super().close()


class _DeadlineSocket:
    """The part of a socket that http.client uses, under one deadline per request."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.deadline = float("inf")

    def limited(self) -> socket.socket:
        """The socket with what is left of the deadline as its timeout."""
        left = self.deadline - time.monotonic()
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
    """Connect within `seconds`, TLS included, with Nagle's algorithm off."""
    sock = socket.create_connection((target.host, target.port), timeout=seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if target.scheme == "https":
        context = ssl.create_default_context()
        return context.wrap_socket(sock, server_hostname=target.host)
    return sock


class _Connection(http.client.HTTPConnection):
    """http.client's protocol over a socket with a deadline."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.host, target.port)
        self._target = target
        self._deadline = float("inf")
        self._limited: _DeadlineSocket | None = None

    def connect(self) -> None:
        """Called by http.client before it sends, where no connection is open."""
        seconds = max(self._deadline - time.monotonic(), 0.001)
        self._limited = _DeadlineSocket(open_socket(self._target, min(seconds, 3600.0)))
        self._limited.deadline = self._deadline
        self.sock = self._limited

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
        if select.select([self._limited.sock], [], [], 0)[0]:
            self.close()
        else:
            self._limited.deadline = deadline


class Client:
    """One connection to the server; used by one thread at a time."""

    def __init__(
        self, target: Target, token: str, tally: Tally, *, deadline: float
    ) -> None:
        self._target = target
        self._token = token
        self._tally = tally
        self._deadline = deadline
        self._connection = _Connection(target)
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
        except _FAILURES as error:
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
        raw = response.read()
        seconds = time.monotonic() - started
        names = {name.lower(): value for name, value in response.getheaders()}
        if response.will_close:
            connection.close()
        return Answer(response.status, names, _decode(raw), seconds)


def _decode(raw: bytes) -> object:
    """The JSON value of a body, or None where it is none (NaN is not JSON)."""
    try:
        return json.loads(raw, parse_constant=_refuse_constant)
    except ValueError:
        return None


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
