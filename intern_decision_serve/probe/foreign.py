"""What others wrote: read with care, so that no answer can end a run.

Pure. It knows nothing of requests, and never decides what a good answer is.
"""

from __future__ import annotations

import json
import math

__all__ = ["decode"]

_MOST_LEVELS = 64  # of lists and objects; a report nests an answer, and must write it


def decode(raw: bytes) -> object:
    """The JSON value of a body, or None where it is none (NaN is not JSON).

    None also for one nested too deeply. A whole number that no float holds is infinite,
    as `1e999` is.
    """
    try:
        document = json.loads(raw, parse_int=_read_int, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return None if _is_deep(document) else document


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
