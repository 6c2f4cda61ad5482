"""A client that is only a socket: the bytes a test says, one whole answer at a time."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fakes import WAIT

__all__ = ["TOKEN", "Answer", "Wire", "make_request", "until"]

TOKEN = "wire-token-of-at-least-32-characters"


def until(holds: Callable[[], object]) -> None:
    """Return once it holds; fail when it never does."""
    deadline = time.monotonic() + WAIT
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.002)


def make_request(
    path: str,
    body: bytes | object = b"",
    *,
    method: str = "POST",
    token: str | None = TOKEN,
    headers: Mapping[str, str | None] | None = None,
) -> bytes:
    """The bytes of a request; a header set to None is left out."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines: dict[str, str | None] = {"Host": "h"}
    if token is not None:
        lines["Authorization"] = f"Bearer {token}"
    if method == "POST":
        lines["Content-Length"] = str(len(data))
    lines.update(headers or {})
    head = [f"{method} {path} HTTP/1.1"]
    head += [f"{name}: {value}" for name, value in lines.items() if value is not None]
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + data


@dataclass(frozen=True)
class Answer:
    """One response, whole: its headers in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON, which its type must say."""
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The error's code; asserts that the envelope holds nothing else."""
        assert set(self.json) == {"error"}
        assert set(self.json["error"]) == {"code", "message"}
        return str(self.json["error"]["code"])

    @property
    def closes(self) -> bool:
        """Whether the server says that it closes the connection."""
        return {"close": True, "keep-alive": False}[self.headers["connection"]]


class Wire:
    """One connection. Every wait of it ends in a failure, not in a hang."""

    def __init__(self, address: Any, *, receive_buffer: int | None = None) -> None:
        self.sock = socket.socket()
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(WAIT)
        try:
            self.sock.connect(tuple(address[:2]))
        except OSError:
            self.sock.close()
            raise
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> Wire:
        """Send all of it."""
        self.sock.sendall(data)
        return self

    def post(self, path: str, body: bytes | object = b"", **options: Any) -> Answer:
        """Send one POST and read its answer."""
        return self.send(make_request(path, body, **options)).read()

    def get(self, path: str, **options: Any) -> Answer:
        """Send one GET and read its answer."""
        return self.send(make_request(path, method="GET", **options)).read()

    def read(self, *, is_head: bool = False) -> Answer:
        """Read exactly one answer; its Content-Length must be right."""
        head = self._read_until(b"\r\n\r\n").decode("latin-1")
        status_line, *lines = head[:-4].split("\r\n")
        match = re.fullmatch(r"HTTP/1\.1 ([0-9]{3}) [A-Za-z -]*", status_line)
        assert match is not None, status_line
        pairs = [line.split(": ", 1) for line in lines]
        headers = {name.lower(): value for name, value in pairs}
        assert len(headers) == len(pairs), "a header came twice"
        if is_head or match[1] == "100":
            return Answer(int(match[1]), headers, b"")
        return Answer(
            int(match[1]), headers, self._take(int(headers["content-length"]))
        )

    def is_at_end(self) -> bool:
        """Whether nothing more comes and the server closed: end-of-file, no reset."""
        return not self._received and self.sock.recv(1) == b""

    def half_close(self) -> None:
        """Tell the server that nothing more comes."""
        self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Close with a reset instead of an end-of-file."""
        linger_off = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_off)
        self.sock.close()

    def _read_until(self, mark: bytes) -> bytes:
        while mark not in self._received:
            self._receive()
        return self._take(self._received.index(mark) + len(mark))

    def _take(self, count: int) -> bytes:
        while len(self._received) < count:
            self._receive()
        taken, self._received = self._received[:count], self._received[count:]
        return taken

    def _receive(self) -> None:
        data = self.sock.recv(65536)
        assert data, f"the server closed after {self._received[:200]!r}"
        self._received += data
