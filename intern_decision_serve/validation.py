"""Turns a JSON document into a frozen request; owns SemIf's rules (422), re-stated.

It does no I/O and never calls the engine. Orderings are counted, never built, and no
message repeats client text of unbounded length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .document import parse_json, quote
from .errors import InvalidRequest
from .pins import MAX_OPTIONS_PER_DECISION, MAX_QUESTIONS_PER_CALL

__all__ = [
    "DecideRequest",
    "Decision",
    "Option",
    "SharedRequest",
    "State",
    "SystemOneRequest",
    "count_orderings",
    "parse_decide",
    "parse_json",
    "parse_shared",
    "parse_systemone",
    "rendered_size",
]

MAX_OPTIONS_FOR_ALL = 4  # 4! = 24 orderings
MIN_OPTIONS = 2
LARGEST_SCORE = 1e300  # the engine's expectation of larger ones can overflow
QUESTION_TYPES = ("choice", "score", "noul")
ORDERINGS = ("none", "rotations", "all")

State = str | dict[str, Any] | list[Any]


@dataclass(frozen=True, slots=True)
class Option:
    """One option as the caller wrote it; both strings may be empty."""

    id: str
    description: str


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision; `options` keep the caller's order, `orderings` is never null."""

    id: str
    question: str
    options: tuple[Option, ...]
    orderings: str

    @property
    def option_ids(self) -> list[str]:
        """The option ids in the caller's order."""
        return [option.id for option in self.options]


@dataclass(frozen=True, slots=True)
class DecideRequest:
    """A valid body of /decide."""

    state: State
    decision: Decision

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The one decision, as /decide/shared holds several."""
        return (self.decision,)


@dataclass(frozen=True, slots=True)
class SharedRequest:
    """A valid body of /decide/shared, decisions in request order."""

    state: State
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class SystemOneRequest:
    """A body of /v1/systemone; the engine's validate_request has the last word."""

    state: State
    questions: dict[str, dict[str, Any]]


def parse_decide(document: object, *, max_decisions: int) -> DecideRequest:
    """Return the request of /decide, or raise InvalidRequest naming the field."""
    fields = _read_body(document)
    _check_workload(fields)
    state = _read_state(fields)
    decision = _read_decision(fields, "")
    _check_rows(count_orderings(decision), "orderings", max_decisions)
    return DecideRequest(state, decision)


def parse_shared(document: object, *, max_decisions: int) -> SharedRequest:
    """Return the request of /decide/shared, or raise InvalidRequest naming the field.

    Orderings are counted, never built, to hold `max_decisions` (1..max rows).
    """
    fields = _read_body(document)
    _check_workload(fields)
    state = _read_state(fields)
    items = _read_list(fields.get("decisions"), "decisions")
    # Every decision is at least one row, so a long list need not be read.
    _check_rows(len(items), "decisions", max_decisions)
    decisions = tuple(
        _read_decision(_read_object(item, f"decisions[{i}]"), f"decisions[{i}].")
        for i, item in enumerate(items)
    )
    _check_unique([decision.id for decision in decisions], "decisions")
    _check_rows(sum(map(count_orderings, decisions)), "orderings", max_decisions)
    return SharedRequest(state, decisions)


def parse_systemone(document: object) -> SystemOneRequest:
    """Return the request of /v1/systemone; question bodies pass through untouched."""
    fields = _read_body(document)
    if "images" in fields or "assets" in fields:
        raise InvalidRequest("images not supported")
    state = _read_state(fields)
    questions = _read_object(fields.get("questions"), "questions")
    if not 1 <= len(questions) <= MAX_QUESTIONS_PER_CALL:
        raise InvalidRequest(
            f"questions holds {len(questions)} questions; 1 to "
            f"{MAX_QUESTIONS_PER_CALL} are allowed, and none is moved to another call"
        )
    for name, question in questions.items():
        path = f"questions[{quote(name)}]"
        if _read_object(question, path).get("type") not in QUESTION_TYPES:
            raise InvalidRequest(f"{path}.type must be choice, score or noul")
        if question["type"] == "score":
            _check_scores(question.get("criteria"), f"{path}.criteria")
    return SystemOneRequest(state, questions)


def count_orderings(decision: Decision) -> int:
    """Return how many orderings the decision asks for, without building any."""
    if decision.orderings == "all":
        return math.factorial(len(decision.options))
    return len(decision.options) if decision.orderings == "rotations" else 1


def rendered_size(state: State) -> int:
    """Return a lower bound, in characters, of the state rendered with indent=2.

    Indentation alone can blow a body up 300 times, so it is summed, not rendered.
    Escapes and the digits of fractions are left out of the sum.
    """
    size = depth = 0
    level: list[Any] = [state]
    while level:
        deeper: list[Any] = []
        for value in level:
            if isinstance(value, str):
                size += len(value) + 2
            elif isinstance(value, dict | list) and value:
                lines = len(value) * (2 * depth + 3) + 2 * depth + 1
                size += lines + 2 + len(value) - 1  # brackets and commas
                if isinstance(value, dict):
                    size += sum(map(len, value)) + 4 * len(value)
                    deeper.extend(value.values())
                else:
                    deeper.extend(value)
            elif isinstance(value, int):
                size += max(1, value.bit_length() * 3 // 10)  # of log10(2) = 0.30103
            else:
                size += 1
        level = deeper
        depth += 1
    return size


def _read_body(document: object) -> dict[str, Any]:
    return _read_object(document, "the body")


def _read_object(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} must be an object")
    return value


def _read_list(value: object, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{path} must be an array")
    return value


def _read_string(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{path} must be a string")
    return value


def _read_nonempty_string(value: object, path: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{path} must be a nonempty string")
    return value


def _read_state(fields: dict[str, Any]) -> State:
    state = fields.get("state")
    if not isinstance(state, str | dict | list) or not state:
        raise InvalidRequest("state must be a nonempty string, object or array")
    return state


def _check_workload(fields: dict[str, Any]) -> None:
    if fields.get("workload") is not None:
        raise InvalidRequest("workload is not supported: there is no workload table")


def _read_decision(fields: dict[str, Any], prefix: str) -> Decision:
    options = _read_options(fields.get("options"), f"{prefix}options")
    return Decision(
        id=_read_nonempty_string(fields.get("id"), f"{prefix}id"),
        question=_read_nonempty_string(fields.get("question"), f"{prefix}question"),
        options=options,
        orderings=_read_orderings(fields.get("orderings"), len(options), prefix),
    )


def _read_options(value: object, path: str) -> tuple[Option, ...]:
    items = _read_list(value, path)
    if not MIN_OPTIONS <= len(items) <= MAX_OPTIONS_PER_DECISION:
        raise InvalidRequest(
            f"{path} holds {len(items)} options; "
            f"{MIN_OPTIONS} to {MAX_OPTIONS_PER_DECISION} are allowed"
        )
    options = tuple(_read_option(item, f"{path}[{i}]") for i, item in enumerate(items))
    _check_unique([option.id for option in options], path)
    return options


def _read_option(value: object, path: str) -> Option:
    fields = _read_object(value, path)
    return Option(
        id=_read_string(fields.get("id"), f"{path}.id"),
        description=_read_string(fields.get("description"), f"{path}.description"),
    )


def _check_scores(criteria: object, path: str) -> None:
    """Refuse values whose expectation may be no number; all else is the engine's."""
    for value in criteria if isinstance(criteria, dict) else ():
        try:
            size = abs(float(value))
        except ValueError:  # the engine names it
            continue
        if LARGEST_SCORE < size < math.inf:
            raise InvalidRequest(f"{path} holds a value over {LARGEST_SCORE:g}")


def _read_orderings(value: object, option_count: int, prefix: str) -> str:
    orderings = "none" if value is None else value
    if not isinstance(orderings, str) or orderings not in ORDERINGS:
        raise InvalidRequest(f"{prefix}orderings must be none, rotations or all")
    if orderings == "all" and option_count > MAX_OPTIONS_FOR_ALL:
        raise InvalidRequest(
            f"{prefix}orderings may be all only up to {MAX_OPTIONS_FOR_ALL} options"
        )
    return orderings


def _check_unique(ids: Sequence[str], path: str) -> None:
    first: dict[str, int] = {}
    for i, name in enumerate(ids):
        if first.setdefault(name, i) != i:
            raise InvalidRequest(f"{path}[{i}].id repeats {path}[{first[name]}].id")


def _check_rows(count: int, unit: str, max_decisions: int) -> None:
    if not 1 <= count <= max_decisions:
        raise InvalidRequest(
            f"{count} {unit} to score; a request may score "
            f"1 to {max_decisions} orderings"
        )
