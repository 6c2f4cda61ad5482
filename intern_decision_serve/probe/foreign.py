"""What others wrote: read and written with care, so that no text can end a run.

It knows nothing of requests, and never decides what a good answer is.
"""

from __future__ import annotations

import json
import math
import re
from typing import TextIO

__all__ = [
    "MISREAD",
    "decode",
    "plain",
    "refuse_constant",
    "say",
    "to_json",
    "without_token",
]

# What reading a document of another shape raises.
MISREAD = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)

_MOST_LEVELS = 64  # of lists and objects; a report nests an answer, and must write it

# What moves a cursor, breaks a line or turns the direction of reading: C0 but the line
# feed, DEL, C1, the Unicode separators and bidirectional marks; and half characters.
_CONTROL = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    "\ud800-\udfff]"
)


def decode(raw: bytes, token: str) -> object:
    """The JSON value of a UTF-8 body, or None where it is none (NaN is not JSON).

    None also for one nested too deeply. A whole number that no float holds is infinite,
    as `1e999` is. The token, however the body spells it, is blotted out of all strings.
    """
    try:
        text = raw.decode("utf-8")
        document = json.loads(text, parse_int=_read_int, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None
    if _is_deep(document):
        return None
    # Without a backslash a JSON string is spelled as it is.
    may_hold = "\\" in text or text != without_token(text, token)
    return _blotted(document, token) if may_hold else document


def without_token(text: str, token: str) -> str:
    """The text with the token, should anything have echoed it, blotted out.

    So is one that ends otherwise, as the wrong ones that a section tries may.
    """
    text = text.replace(token, "[token]")
    return text.replace(token[:-1], "[token]") if len(token) > 7 else text


def plain(text: str) -> str:
    r"""The text with control characters as JSON spells them; only "\n" stays."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def say(stream: TextIO, line: str) -> None:
    """Write one line to a terminal, whatever the line holds and the stream encodes."""
    encoding = stream.encoding or "utf-8"
    shown = plain(line).replace("\n", "\\n").encode(encoding, "backslashreplace")
    stream.write(shown.decode(encoding) + "\n")


def to_json(value: object) -> str:
    """A JSON file's text: UTF-8 can hold it, and what is not finite is null."""
    shown = json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    return plain(shown) + "\n"


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return value


def _blotted(document: object, token: str) -> object:
    if isinstance(document, str):
        return without_token(document, token)
    if isinstance(document, list):
        return [_blotted(part, token) for part in document]
    if isinstance(document, dict):
        return {
            without_token(name, token): _blotted(part, token)
            for name, part in document.items()
        }
    return document


def _read_int(text: str) -> float:
    value = float(text)
    return int(text) if math.isfinite(value) else value


def refuse_constant(name: str) -> object:
    """For `parse_constant`: NaN and the infinities are not JSON; ValueError."""
    raise ValueError(f"{name} is not JSON")


def _is_deep(document: object) -> bool:
    level = [document]
    for _ in range(_MOST_LEVELS):
        level = [
            part
            for whole in level
            if isinstance(whole, dict | list)
            for part in (whole.values() if isinstance(whole, dict) else whole)
        ]
        if not level:
            return False
    return True
