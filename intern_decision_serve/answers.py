"""Checks what predict() answered before a surface hands it on (INV-1); pure.

An answer that does not fit its question is a ScoringFailed. Nothing here mends,
fills in or guesses a value.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from .document import quote
from .errors import ScoringFailed, ServiceError

__all__ = ["check_answer", "fail_as_scoring", "read_answers", "read_number"]

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def fail_as_scoring(
    build: Callable[Arguments, Result],
) -> Callable[Arguments, Result]:
    """Make any failure of `build` a ScoringFailed, its traceback in the log (INV-1)."""

    @wraps(build)
    def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return build(*args, **kwargs)
        except ServiceError:
            raise
        except Exception:
            logger.exception("building the response failed")
        raise ScoringFailed("the response could not be built from the model's answer")

    return guarded


def read_answers(response: object, fields: Collection[str]) -> dict[str, Any]:
    """Return `response.answers`: one per field and no other, all of it finite JSON."""
    _check_finite_json(response)
    answers = _read_object(response, "response").get("answers")
    answers = _read_object(answers, "answers block")
    for field in fields:
        if field not in answers:
            raise ScoringFailed(f"the model gave no answer for {quote(field)}")
    if len(answers) != len(fields):
        raise ScoringFailed("the model answered a question that was not asked")
    return answers


def check_answer(
    answer: object, field: str, kind: str, options: Collection[str] | None
) -> None:
    """Check one answer's shape; `options` None leaves the option names unchecked."""
    where = f"answer for {quote(field)}"
    native = _read_object(answer, where)
    if native.get("type") != kind:
        raise ScoringFailed(f"the model's {where} has another type than its question")
    probabilities = _read_object(native.get("probabilities"), where)
    if options is not None and probabilities.keys() != set(options):
        raise ScoringFailed(f"the model's {where} has other options than its question")
    for option in probabilities:
        if read_number(probabilities, option) < 0:
            raise ScoringFailed(f"the model's {where} has a negative probability")
    read_number(native, "confidence")
    if kind != "choice":
        read_number(native, kind)
    elif native.get("choice") not in list(probabilities):
        raise ScoringFailed(f"the model's {where} chose something not offered")


def read_number(values: dict[str, Any], key: str) -> float:
    """Return the finite number under `key`, unchanged; a bool is none."""
    number = values.get(key)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ScoringFailed(f"the model's response has no number at {quote(key)}")
    if not math.isfinite(number):
        raise ScoringFailed(f"the model's response has no finite {quote(key)}")
    return number


def _read_object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ScoringFailed(f"the model's {what} is missing or not an object")
    return value


def _check_finite_json(value: object) -> None:
    """Refuse a number or type, at any depth, that strict JSON cannot carry."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item)
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise ScoringFailed("the model's response holds a non-finite number")
        elif item is not None and not isinstance(item, str | int):
            raise ScoringFailed("the model's response holds something not JSON")
