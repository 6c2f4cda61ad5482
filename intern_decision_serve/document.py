"""Turns body bytes into one JSON document; owns every rule of strict JSON (422).

It does no I/O and knows no endpoint. Parsing may cost no more than a few times the
body, in time and in memory: counts come before constructions, and no message repeats
client text of unbounded length.
"""

from __future__ import annotations

import json
import math
import re
from itertools import accumulate
from typing import Any, NoReturn

from .errors import InvalidRequest

__all__ = ["MAX_DEPTH", "MAX_INTEGER_DIGITS", "parse_json", "quote"]

MAX_DEPTH = 100
MAX_INTEGER_DIGITS = 4300  # CPython's own default limit for int(str)

# Facts: one handler thread parses beside a running forward, under the same GIL, so a
# hostile body must cost about what a plain one of its size costs. json.loads builds
# 50 to 90 bytes of objects per two bytes of "[[],[],...", and recurses in C. Both are
# bounded beforehand by counting on the raw bytes with C-speed methods. Up to the
# first syntax error json.loads sees the same strings and brackets as the skeleton,
# so what the skeleton bounds holds for broken documents too.

_STRUCTURAL = b"[]{},"
_NOT_STRUCTURAL = bytes(set(range(256)) - set(_STRUCTURAL))
_BRACES_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_BRACKETS_TO_STEPS = bytes.maketrans(b"[]", b"\x01\xff")  # +1 and -1, read as int8

# A surrogate escape without its partner, once escaped backslashes are out of the way.
_LONE_SURROGATE = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F])"
)


def parse_json(body: bytes, *, max_values: int) -> Any:
    """Return the one JSON document in `body`; anything else is an InvalidRequest.

    `max_values` bounds containers plus commas: a body with more values than a few
    times MAX_TOKENS fits no call, and the bound keeps parsing short and small.
    """
    text = _decode_utf8(body)
    _check_structure(body, max_values)
    document = _load(text)
    _check_surrogates(body)
    return document


def _decode_utf8(body: bytes) -> str:
    if not body:
        raise InvalidRequest("the body is empty, not JSON")
    if body.startswith(b"\xef\xbb\xbf"):
        raise InvalidRequest("the body starts with a byte order mark")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the body is not UTF-8: {error.reason} at byte {error.start}"
        ) from None


def _check_structure(body: bytes, max_values: int) -> None:
    """Refuse too many values or too deep a nesting, before anything is built."""
    opened = body.count(b"[") + body.count(b"{")
    if opened <= MAX_DEPTH and opened + body.count(b",") <= max_values:
        return
    skeleton = _strip_to_skeleton(body, max_values)
    containers = skeleton.count(b"[")
    if containers + skeleton.count(b",") > max_values:
        _refuse_values(max_values)
    if skeleton.count(b"]") > containers:
        raise InvalidRequest("the body is not JSON: brackets do not match")
    _check_depth(skeleton.translate(None, b","))


def _strip_to_skeleton(body: bytes, max_values: int) -> bytes:
    """Return only the commas and brackets outside strings, braces as brackets."""
    plain = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    # Each value has at most a key and a string: four quotes.
    if plain.count(b'"') > 4 * max_values + 2:
        _refuse_values(max_values)
    outside = b"".join(plain.split(b'"')[::2])
    return outside.translate(_BRACES_TO_BRACKETS, _NOT_STRUCTURAL)


def _check_depth(brackets: bytes) -> None:
    """Refuse a nesting that json.loads would answer with a RecursionError."""
    steps = memoryview(brackets.translate(_BRACKETS_TO_STEPS)).cast("b")
    if max(accumulate(steps), default=0) > MAX_DEPTH:
        raise InvalidRequest(f"the body is nested over {MAX_DEPTH} levels")


def _refuse_values(max_values: int) -> NoReturn:
    raise InvalidRequest(
        f"the body holds too many values; at most {max_values} are allowed"
    )


def _check_surrogates(body: bytes) -> None:
    """Refuse half a surrogate pair: no tokenizer and no UTF-8 can carry it."""
    if b"\\ud" in body or b"\\uD" in body:
        # Same length, so that what stood apart stays apart.
        if _LONE_SURROGATE.search(body.replace(b"\\\\", b"__")):
            raise InvalidRequest("the body holds a lone surrogate escape")


def _load(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"the body is not JSON: {error.msg} (character {error.pos})"
        ) from None
    except ValueError:  # the interpreter's own limit on int(str) was set lower
        raise InvalidRequest("the body holds an integer too long to read") from None


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        for key, _ in pairs:
            if key not in members:  # seen before, and taken out then
                raise InvalidRequest(f"the body repeats the key {quote(key)}")
            del members[key]
    return members


def _read_int(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_INTEGER_DIGITS:
        raise InvalidRequest(
            f"the body holds an integer of over {MAX_INTEGER_DIGITS} digits"
        )
    return int(digits)


def _read_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise InvalidRequest("the body holds a number too large for a float")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"the body holds {name}, which is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_build_object,
    parse_int=_read_int,
    parse_float=_read_float,
    parse_constant=_refuse_constant,
)


def quote(text: str) -> str:
    """Return client text for a message: escaped, and cut to a bounded length."""
    return repr(text) if len(text) <= 60 else repr(text[:60]) + "..."
