"""What the load sends: decisions, small and long, and bodies to refuse."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

from .client import build_request

__all__ = [
    "BODIES",
    "MIB",
    "PROMPTS",
    "STREAM_FIELDS",
    "long_request",
    "pack",
    "small_request",
]

MIB = 1024 * 1024
STREAM_FIELDS = {"q"}  # tells the stream's calls from those of a legal large body
_QUESTION = {
    "type": "choice",
    "instructions": "What should happen to this command?",
    "criteria": {
        "allow": "harmless and reversible",
        "ask": "needs a person",
        "deny": "destroys data",
    },
}


def small_request(seed: int = 0) -> dict[str, Any]:
    """A decision as the gate's callers send it: a command and one question."""
    state = {"command": f"rm -rf build/{seed}", "cwd": "/srv/app", "user": "deploy"}
    return {"state": state, "questions": {"q": _QUESTION}}


def long_request(seed: int = 0, lines: int = 250) -> dict[str, Any]:
    """A long state, some 5,000 tokens."""
    log = [f"line {i + seed} of the log says that all is well" for i in range(lines)]
    return {"state": {"log": log}, "questions": {"q": _QUESTION}}


PROMPTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "small": small_request,
    "long": long_request,
}


def pack(document: object) -> bytes:
    """A document as a POST to /v1/systemone."""
    return build_request("/v1/systemone", json.dumps(document).encode())


def _wrap(state: bytes) -> bytes:
    """A legal body around a state, of about a MiB."""
    questions = json.dumps({"flood": _QUESTION}).encode()
    return b'{"state": ' + state + b', "questions": ' + questions + b"}"


def _fill(unit: bytes, around: bytes = b"[]", size: int = MIB - 512) -> bytes:
    inner = unit * ((size - 2) // len(unit))
    return around[:1] + inner.rstrip(b",") + around[1:]


def _objects(size: int = MIB - 512) -> bytes:
    pairs = b",".join(b'"k%06d":[{}]' % i for i in range(size // 16))
    return b"{" + pairs + b"}"


def _send(body: bytes, headers: str = "") -> bytes:
    return build_request("/v1/systemone", body, headers=headers)


def _gzip(body: bytes) -> bytes:
    return _send(gzip.compress(body, 9), "Content-Encoding: gzip\r\n")


def _chunked(size: int = MIB - 512, chunk: int = 300) -> bytes:
    body = b"%x\r\n" % chunk + b"x" * chunk + b"\r\n"
    head = _send(b"?").replace(b"Content-Length: 1", b"Transfer-Encoding: chunked")
    return head[:-1] + body * (size // chunk) + b"0\r\n\r\n"


# Name -> one request of (about) 1 MiB, none of which may be scored for long.
BODIES: dict[str, Callable[[], bytes]] = {
    "not JSON at the first byte": lambda: _send(b"x" * (MIB - 512)),
    "not JSON at the last byte": lambda: _send(_wrap(_fill(b"1,"))[:-1]),
    "not UTF-8 at the last byte": lambda: _send(_wrap(_fill(b"a", b'""')) + b"\xff"),
    "empty arrays": lambda: _send(_wrap(_fill(b"[],"))),
    "nested arrays": lambda: _send(_wrap(b"[" * (MIB // 2) + b"]" * (MIB // 2 - 512))),
    "objects of many keys": lambda: _send(_wrap(_objects())),
    "short strings": lambda: _send(_wrap(_fill(b'"",'))),
    "escapes": lambda: _send(_wrap(_fill(b"\\u00e9", b'""'))),
    "escaped quotes": lambda: _send(_wrap(_fill(b'\\"', b'""'))),
    "commas in a string": lambda: _send(_wrap(_fill(b",[", b'""'))),
    "long integers": lambda: _send(_wrap(_fill(b"9" * 4300 + b","))),
    "long fractions": lambda: _send(_wrap(_fill(b"0." + b"9" * 4300 + b","))),
    "a legal text, over MAX_TOKENS": lambda: _send(_wrap(_fill(b"a b ", b'""'))),
    "30,000 legal values": lambda: _send(_wrap(_fill(b'"%s",' % (b"v" * 31)))),
    "a lone surrogate at the end": lambda: _send(
        _wrap(_fill(b"\\ud83d\\ude00", b'""')[:-1] + b'\\ud83d"')
    ),
    "a gzip bomb": lambda: _gzip(b"0" * (16 * MIB)),
    "gzip of a legal MiB": lambda: _gzip(_wrap(_fill(b"a b ", b'""'))),
    "gzip of empty arrays": lambda: _gzip(_wrap(_fill(b"[],"))),
    "small chunks": _chunked,
}
