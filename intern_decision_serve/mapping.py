"""Maps semif-shaped decisions onto predict() calls and its answers back; pure.

    decisions -> orderings -> wave 0, wave 1, ... -> calls of at most 16 -> results

It only re-keys: no number of an answer is changed (INV-1), and it holds neither prompt
nor readout. Decision ids never reach a call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from .answers import check_answer, fail_as_scoring, read_answers, read_number
from .errors import ScoringFailed
from .pins import MAX_QUESTIONS_PER_CALL
from .validation import (
    DecideRequest,
    Decision,
    Option,
    SharedRequest,
    State,
    count_orderings,
)

__all__ = [
    "Call",
    "Row",
    "build_decide",
    "build_shared",
    "count_orderings",
    "plan_calls",
]

PROBABILITY_FLOOR = 1e-300  # the log of a probability of exactly 0 must be finite
METHOD = "mean_log_probability"

Options = tuple[Option, ...]
Scored = Sequence[tuple[dict[str, Any], str]]  # per call: response, prompt_sha256


@dataclass(frozen=True, slots=True)
class Row:
    """One ordering of one decision, as one question of a call.

    `position` is the decision's place in the request, `wave` the ordering's number.
    """

    position: int
    wave: int
    field: str
    options: Options

    @property
    def option_ids(self) -> list[str]:
        """The option ids in this ordering's order."""
        return [option.id for option in self.options]


@dataclass(frozen=True, slots=True)
class Call:
    """One predict() request and the rows its answers belong to, in field order."""

    index: int
    request: dict[str, Any]
    rows: tuple[Row, ...]


def plan_calls(state: State, decisions: Sequence[Decision]) -> tuple[Call, ...]:
    """Return every call of a request in the order it is to be scored.

    Wave k holds ordering k of each decision that has more than k, packed greedily in
    request order. So wave 0 is the request as written, and no call holds two
    orderings of the same decision.
    """
    calls: list[Call] = []
    for k, wave in enumerate(_split_into_waves(decisions)):
        for start in range(0, len(wave), MAX_QUESTIONS_PER_CALL):
            packed = wave[start : start + MAX_QUESTIONS_PER_CALL]
            rows = tuple(
                Row(position, k, _name_field(number, len(packed)), options)
                for number, (position, options) in enumerate(packed, start=1)
            )
            calls.append(_make_call(len(calls), state, decisions, rows))
    return tuple(calls)


def _expand_orderings(decision: Decision) -> Iterator[Options]:
    """Yield the option orders to score, the caller's first; nothing is built ahead."""
    options = decision.options
    if decision.orderings == "all":
        return permutations(options)
    shifts = range(len(options) if decision.orderings == "rotations" else 1)
    return (options[k:] + options[:k] for k in shifts)


def _split_into_waves(
    decisions: Sequence[Decision],
) -> Iterator[list[tuple[int, Options]]]:
    expanded = [(i, _expand_orderings(each)) for i, each in enumerate(decisions)]
    while wave := [
        (position, options)
        for position, orderings in expanded
        if (options := next(orderings, None)) is not None
    ]:
        yield wave


def _name_field(number: int, question_count: int) -> str:
    return "q" if question_count == 1 else f"q{number}"


def _make_call(
    index: int, state: State, decisions: Sequence[Decision], rows: tuple[Row, ...]
) -> Call:
    questions = {
        row.field: {
            "type": "choice",
            "instructions": decisions[row.position].question,
            "criteria": {option.id: option.description for option in row.options},
        }
        for row in rows
    }
    return Call(index, {"state": state, "questions": questions}, rows)


@fail_as_scoring
def build_decide(
    request: DecideRequest,
    calls: Sequence[Call],
    scored: Scored,
    labels: Mapping[str, Any],
    total_seconds: float,
) -> dict[str, Any]:
    """Return the body of /decide; a plain result carries its two times as well."""
    decision = request.decision
    [rows] = _read_rows([decision], calls, scored, labels)
    if decision.orderings != "none":
        return _combine(decision, rows)
    [result] = rows
    [(response, _)] = scored
    return {
        **result,
        "total_seconds": total_seconds,
        "forward_seconds": _inference_ms(response) / 1000,
    }


@fail_as_scoring
def build_shared(
    request: SharedRequest,
    calls: Sequence[Call],
    scored: Scored,
    labels: Mapping[str, Any],
    total_seconds: float,
) -> dict[str, Any]:
    """Return the body of /decide/shared, results in request order (Deltas 10)."""
    by_decision = _read_rows(request.decisions, calls, scored, labels)
    results = [
        rows[0] if decision.orderings == "none" else _combine(decision, rows)
        for decision, rows in zip(request.decisions, by_decision, strict=True)
    ]
    responses = [response for response, _ in scored]
    timing = {
        "total_seconds": total_seconds,
        "batch_size": sum(len(call.rows) for call in calls),
        "calls": len(calls),
        "questions_per_call": [len(call.rows) for call in calls],
        "input_tokens": [_input_tokens(response) for response in responses],
        "inference_seconds": math.fsum(map(_inference_ms, responses)) / 1000,
    }
    return {"results": results, "timing": timing}


def _read_rows(
    decisions: Sequence[Decision],
    calls: Sequence[Call],
    scored: Scored,
    labels: Mapping[str, Any],
) -> list[list[dict[str, Any]]]:
    """Return each decision's per-ordering results, in wave order."""
    by_decision: list[list[dict[str, Any]]] = [[] for _ in decisions]
    for call, (response, prompt_sha256) in zip(calls, scored, strict=True):
        answers = read_answers(response, call.request["questions"].keys())
        shared = _describe_call(response, prompt_sha256, labels)
        for row in call.rows:
            decision = decisions[row.position]
            plain = decision.orderings == "none"
            row_id = decision.id if plain else f"{decision.id}#o{row.wave}"
            result = _read_row(row_id, row, call, answers[row.field], shared)
            by_decision[row.position].append(result)
    return by_decision


def _describe_call(
    response: dict[str, Any], prompt_sha256: str, labels: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what every result of a call shares (Deltas 6)."""
    calibration = response.get("calibration")
    if not isinstance(calibration, dict):
        raise ScoringFailed("the model's response has no calibration")
    return {
        "calibration": calibration,
        "input_tokens": _input_tokens(response),
        "prompt_sha256": prompt_sha256,
        "prompt_version": labels["prompt_version"],
        "model": labels["model"],
        "readout": labels["readout"],
        "probability_status": labels["probability_status"],
    }


def _read_row(
    row_id: str, row: Row, call: Call, native: dict[str, Any], shared: dict[str, Any]
) -> dict[str, Any]:
    """Return one ordering's result; every number is the answer's own (INV-1)."""
    check_answer(native, row.field, "choice", row.option_ids)
    described = dict(shared)
    return {
        "id": row_id,
        "option_ids": row.option_ids,
        "probabilities": [native["probabilities"][key] for key in row.option_ids],
        "top": native["choice"],
        "confidence": native["confidence"],
        "calibration": described.pop("calibration"),
        "native": native,
        **described,
        "call": {
            "index": call.index,
            "field": row.field,
            "questions": len(call.rows),
        },
    }


def _combine(decision: Decision, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the averaged result over all orderings of one decision.

    The first maximum in the caller's order is `top`; a per-ordering tie is the
    model's own (Deltas 13).
    """
    option_ids = decision.option_ids
    columns = {
        key: [row["native"]["probabilities"][key] for row in rows] for key in option_ids
    }
    probabilities = _average_logs([columns[key] for key in option_ids])
    top = option_ids[probabilities.index(max(probabilities))]
    return {
        "id": decision.id,
        "option_ids": option_ids,
        "combined": {
            "method": METHOD,
            "orderings": len(rows),
            "probabilities": probabilities,
            "top": top,
            "agreement": sum(row["top"] == top for row in rows) / len(rows),
            "spread": {
                key: {"min": min(column), "max": max(column)}
                for key, column in columns.items()
            },
        },
        "orderings": rows,
    }


def _average_logs(columns: list[list[float]]) -> list[float]:
    """Return the renormalised mean of log p per option.

    fsum rounds once whatever the order of its terms, so options that only swapped
    positions come out equal: a position bias cancels exactly.
    """
    means = [
        math.fsum(math.log(max(p, PROBABILITY_FLOOR)) for p in column) / len(column)
        for column in columns
    ]
    weights = [math.exp(mean - max(means)) for mean in means]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _input_tokens(response: dict[str, Any]) -> int:
    tokens = response["usage"]["input_tokens"]
    if type(tokens) is not int:
        raise ScoringFailed("the model's response has no input_tokens")
    return tokens


def _inference_ms(response: dict[str, Any]) -> float:
    return read_number(response["timing"], "inference_ms")
