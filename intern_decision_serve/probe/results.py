"""Whether one result is what the contract says a result is; pure.

Each problem is a phrase; no problems is an empty list. Nothing here asks the server.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from .rows import Document
from .session import Reply

__all__ = [
    "QUESTIONS_PER_CALL",
    "answer_part",
    "call_of",
    "in_short",
    "option_ids",
    "problems",
    "same_answer",
]

# The contract's section "Mapping onto the model", "The result for one ordering".
RESULT_FIELDS = (
    "id", "option_ids", "probabilities", "top", "confidence", "calibration", "native",
    "input_tokens", "prompt_sha256", "prompt_version", "model", "readout",
    "probability_status", "call",
)  # fmt: skip

# What one answer says about the server or the clock rather than about the decision.
_NOT_THE_ANSWER = {
    "total_seconds", "forward_seconds", "timing", "model", "prompt_version", "readout",
    "probability_status",
}  # fmt: skip

_NAMES = ("calibration", "prompt_version", "model", "readout", "probability_status")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")

QUESTIONS_PER_CALL = 16  # the contract's, not the server's word for it


def option_ids(decision: Document) -> list[str]:
    """The decision's option ids in the caller's order."""
    options = decision["options"]
    assert isinstance(options, list)
    return [str(option["id"]) for option in options]


def problems(
    decision: Document,
    result: Reply,
    *,
    name: str | None = None,
    model: object = None,
) -> list[str]:
    """What is wrong with a plain result, or with one ordering's under its `name`.

    `model` is what `/health` names, None where it names none.
    """
    missing = [field for field in RESULT_FIELDS if field not in result]
    if missing:
        return [f"lacks {', '.join(missing)}"]
    found = []
    wanted = name if name is not None else decision["id"]
    if result["id"] != wanted:
        found.append(f"id is {result['id']!r}, asked as {wanted!r}")
    ids = option_ids(decision)
    if result["option_ids"] != ids:
        found.append("option_ids are not the caller's, in the caller's order")
    else:
        found += _number_problems(ids, result)
    if model is not None and result["model"] != model:
        found.append("model is not /health's")
    return found + _name_problems(result)


def _name_problems(result: Reply) -> list[str]:
    """What is wrong with what says how the answer came about."""
    found = [f"{field} is {result[field]!r}" for field in _NAMES if not result[field]]
    if not isinstance(sha := result["prompt_sha256"], str) or not _SHA256.match(sha):
        found.append("prompt_sha256 is no sha256")
    return found


def _number_problems(ids: Sequence[str], result: Reply) -> list[str]:
    """What is wrong with the numbers, once the option ids are right (INV-1)."""
    shares = result["probabilities"]
    native = result["native"]
    if len(shares) != len(ids) or not all(map(math.isfinite, shares)):
        return ["probabilities are not one finite number per option"]
    found = []
    if abs(math.fsum(shares) - 1) > 1e-6:
        found.append(f"probabilities sum to {math.fsum(shares)}")
    if [native["probabilities"].get(name) for name in ids] != shares:
        found.append("probabilities are not native's")
    if result["top"] != native.get("choice") or result["top"] not in ids:
        found.append("top is not native's choice")
    elif shares[ids.index(result["top"])] != max(shares):
        found.append("top is not the largest probability")
    if result["confidence"] != native.get("confidence"):
        found.append("confidence is not native's")
    return found


def call_of(place: int, count: int) -> Document:
    """The `call` of the plain decision at `place` of `count`, by the packing rule."""
    index, within = divmod(place, QUESTIONS_PER_CALL)
    questions = min(count - index * QUESTIONS_PER_CALL, QUESTIONS_PER_CALL)
    field = f"q{within + 1}" if questions > 1 else "q"
    return {"index": index, "field": field, "questions": questions}


def answer_part(document: object) -> object:
    """The document without clocks and without what names the server."""
    if isinstance(document, dict):
        return {
            name: answer_part(value)
            for name, value in document.items()
            if name not in _NOT_THE_ANSWER
        }
    if isinstance(document, list):
        return [answer_part(value) for value in document]
    return document


def same_answer(one: object, other: object) -> bool:
    """Whether two documents give the same answer, bit for bit."""
    return answer_part(one) == answer_part(other)


def in_short(found: Iterable[str], limit: int = 3) -> str:
    """The first problems in one line, and how many more there are."""
    seen = list(found)
    more = f", and {len(seen) - limit} more" if len(seen) > limit else ""
    return "; ".join(seen[:limit]) + more
