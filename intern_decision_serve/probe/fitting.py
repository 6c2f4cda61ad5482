"""Whether a request fits a server's own limits, so that a right server never fails.

Decisions and bytes are counted. Tokens are not known before an answer: a refusal stands
for the limit only where the text is long enough to be over it, whatever the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from .averaging import count_orderings
from .client import Answer
from .results import QUESTIONS_PER_CALL
from .rows import Document
from .session import Probe, Reply, object_of

__all__ = ["OverLimits", "Question", "answered", "ask_fitting", "body_limit"]

Question = tuple[str, str, Document]  # name, path, body

# A byte is at most a token; what a template adds is not the caller's.
_TEMPLATE_TOKENS = 400
_QUESTION_TOKENS = 100


class OverLimits(Exception):
    """Raised when a request does not fit the limits in the server's `/health`."""


def body_limit(probe: Probe) -> int:
    """MAX_BODY_BYTES: as told, as `/health` shows it, or the contract's default."""
    told: int | None = probe.options.max_body_bytes
    return told or probe.limit("max_body_bytes", 1048576)


def ask_fitting(
    probe: Probe, path: str, body: Document, expected: tuple[int, ...] = (200,)
) -> Answer:
    """The answer to one POST, a 200 or another of `expected`; OverLimits without one.

    Anything else is Unanswered.
    """
    size, most = len(json.dumps(body).encode()), body_limit(probe)
    if size > most:
        raise OverLimits(f"{size} bytes are over MAX_BODY_BYTES, {most}")
    rows, most = _count_rows(body), probe.limit("max_decisions", 64)
    if rows > most:
        raise OverLimits(f"{rows} orderings are over MAX_DECISIONS, {most}")
    may_refuse = _most_tokens(body) > probe.limit("max_tokens", 8192)
    allowed = (*expected, 422) if may_refuse else expected
    answer = probe.client.post(path, body, expected=allowed)
    if may_refuse and (answer.status, answer.code) == (422, "invalid_request"):
        most = probe.limit("max_tokens", 8192)
        raise OverLimits(f"refused as over the server's limits, MAX_TOKENS is {most}")
    if answer.status not in expected or answer.status == 200:
        object_of(path, answer)
    return answer


def answered(
    probe: Probe, questions: Sequence[Question]
) -> tuple[list[tuple[Question, Reply]], dict[str, str]]:
    """Those questions that fit, with their answers, and why the others do not."""
    kept: list[tuple[Question, Reply]] = []
    left_out: dict[str, str] = {}
    for name, path, body in questions:
        try:
            answer = ask_fitting(probe, path, body)
            kept.append(((name, path, body), object_of(path, answer)))
        except OverLimits as error:
            left_out[name] = str(error)
    return kept, left_out


def _decisions(body: Document) -> list[Document]:
    decisions = body.get("decisions", [body])
    return decisions if isinstance(decisions, list) else []


def _count_rows(body: Document) -> int:
    """The orderings a `/decide` or `/decide/shared` body asks for; 0 for another."""
    return sum(count_orderings(d) for d in _decisions(body) if "options" in d)


def _most_tokens(body: Document) -> int:
    """More tokens than any call of the body can have."""
    parts = [len(json.dumps(part)) for part in _decisions(body)]
    longest = sum(sorted(parts, reverse=True)[:QUESTIONS_PER_CALL])
    state = len(json.dumps(body.get("state"))) if "decisions" in body else 0
    questions = min(max(len(parts), _count_questions(body)), QUESTIONS_PER_CALL)
    return state + longest + _TEMPLATE_TOKENS + questions * _QUESTION_TOKENS


def _count_questions(body: Document) -> int:
    questions = body.get("questions")
    return len(questions) if isinstance(questions, dict) else 1
