"""What others wrote: read with care, so that no answer can end a run.

Pure. It knows nothing of requests, and never decides what a good answer is.
"""

from __future__ import annotations

import json
import math

__all__ = ["decode", "without_token"]

_MOST_LEVELS = 64  # of lists and objects; a report nests an answer, and must write it


def decode(raw: bytes, token: str) -> object:
    """The JSON value of a UTF-8 body, or None where it is none (NaN is not JSON).

    None also for one nested too deeply. A whole number that no float holds is infinite,
    as `1e999` is. The token, however the body spells it, is blotted out of all strings.
    """
    try:
        text = raw.decode("utf-8")
        document = json.loads(
            text, parse_int=_read_int, parse_constant=_refuse_constant
        )
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


def _refuse_constant(name: str) -> object:
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
