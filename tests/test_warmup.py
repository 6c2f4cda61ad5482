"""Settle, swap and ladder as pure steps over a score function: warmup.py."""

from __future__ import annotations

import json
import logging
import types
from typing import Any

import pytest
from fake_torch import FakeTorch

from intern_decision_serve.errors import OutOfMemory, ScoringFailed, StartupRefused
from intern_decision_serve.warmup import (
    SETTLE_LIMIT,
    WARMUP,
    build_rung,
    check_same,
    choose_lengths,
    climb,
    drop_vision,
    find_difference,
    settle,
)


def answer(value: float, *, ms: float = 1.0) -> dict[str, Any]:
    return {
        "answers": {"q": {"probabilities": {"alarm": value}}},
        "usage": {"input_tokens": 90},
        "timing": {"inference_ms": ms},
    }


def scorer(*values: float) -> Any:
    left = list(values)

    def score(request: dict[str, Any]) -> tuple[dict[str, Any], str]:
        assert request is WARMUP
        value = left.pop(0)
        return answer(value, ms=len(left)), "hash"

    return score


@pytest.mark.parametrize(
    ("values", "calls"), [((0.5, 0.5), 2), ((0.1, 0.2, 0.2), 3), ((1, 2, 1, 1), 4)]
)
def test_the_warm_up_settles_when_two_answers_in_a_row_are_equal(
    values: tuple[float, ...], calls: int
) -> None:
    response, count = settle(scorer(*values))
    assert count == calls
    assert response["answers"] == answer(values[-1])["answers"]


def test_a_warm_up_that_never_settles_refuses_with_the_difference() -> None:
    values = [place / 10 for place in range(SETTLE_LIMIT)]
    with pytest.raises(StartupRefused) as refusal:
        settle(scorer(*values))
    assert str(refusal.value) == (
        "the warm-up gave no two equal answers in a row in 8 calls; the last two "
        "differ: answers.q.probabilities.alarm: 0.6 became 0.7"
    )


def test_an_answer_that_is_no_number_never_settles() -> None:
    with pytest.raises(StartupRefused, match="nan became nan"):
        settle(scorer(*[float("nan")] * SETTLE_LIMIT))


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        ({"a": 1.0}, {"a": 1.0}, None),
        ({"a": 1.0}, {"a": 1}, "a: 1.0 became 1"),
        ({"a": {"b": 1.0}}, {"a": {"b": 2.0}}, "a.b: 1.0 became 2.0"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "keys: ['a', 'b'] became ['b', 'a']"),
        ({"a": {}}, {"a": {"b": 1}}, "a: [] became ['b']"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "a.1: 2 became 3"),
        ({"a": [1]}, {"a": [1, 3]}, "a: 1 items became 2"),
        ({"a": "x"}, {"a": None}, "a: 'x' became None"),
        ({"timing": {"ms": 1}}, {"timing": {"ms": 2}}, None),
        ({"a": {"timing": 1}}, {"a": {"timing": 2}}, "a.timing: 1 became 2"),
        ({"a": True}, {"a": 1}, "a: True became 1"),
    ],
)
def test_a_difference_is_named_by_its_place(
    before: Any, after: Any, difference: str | None
) -> None:
    assert find_difference(before, after) == difference


def test_a_swap_that_changes_the_answer_refuses_and_names_the_way_out() -> None:
    check_same(answer(0.25, ms=1), answer(0.25, ms=2))
    with pytest.raises(StartupRefused) as refusal:
        check_same(answer(0.25), answer(0.26))
    assert str(refusal.value) == (
        "the warm-up changed when the vision tower was dropped: "
        "answers.q.probabilities.alarm: 0.25 became 0.26; "
        "INTERN_DECISION_KEEP_VISION=1 keeps it"
    )


def test_the_tower_gives_way_to_a_module_that_raises_when_called() -> None:
    model = types.SimpleNamespace(model=types.SimpleNamespace(visual=object()))
    torch = FakeTorch()
    drop_vision(torch, model)
    assert isinstance(model.model.visual, torch.nn.Module)
    with pytest.raises(RuntimeError, match="vision tower was dropped"):
        model.model.visual("pixels", grid=1)


@pytest.mark.parametrize(
    "model",
    [
        types.SimpleNamespace(),
        types.SimpleNamespace(model=types.SimpleNamespace()),
        types.SimpleNamespace(model=types.SimpleNamespace(visual=None)),
    ],
)
def test_a_model_without_a_tower_refuses(model: Any) -> None:
    with pytest.raises(StartupRefused, match="INTERN_DECISION_KEEP_VISION=1"):
        drop_vision(FakeTorch(), model)


@pytest.mark.parametrize(
    ("wanted", "max_tokens", "is_cuda", "lengths"),
    [
        (None, 8192, True, (256, 512, 1024, 2048, 4096, 6144, 8192)),
        (None, 2000, True, (256, 512, 1024, 2000)),
        (None, 4097, True, (256, 512, 1024, 2048, 4096, 4097)),
        (None, 100, True, (100,)),
        (None, 8192, False, ()),
        ((), 8192, True, ()),
        ((512, 128, 512), 8192, True, (128, 512)),
        ((512, 9000), 8192, True, (512,)),
        ((128,), 8192, False, (128,)),
    ],
)
def test_the_ladder_has_a_rung_per_size_class_up_to_the_longest_call(
    wanted: tuple[int, ...] | None,
    max_tokens: int,
    is_cuda: bool,
    lengths: tuple[int, ...],
) -> None:
    assert choose_lengths(wanted, max_tokens, is_cuda=is_cuda) == lengths


def count_tokens(request: dict[str, Any]) -> int:
    """Seven characters a token, as a real tokenizer would be about."""
    return -(-len(json.dumps(request)) // 7)


@pytest.mark.parametrize("questions", [1, 16])
@pytest.mark.parametrize("length", [2048, 2049, 4000, 8192])
def test_a_rung_has_its_length_or_a_little_less(length: int, questions: int) -> None:
    request = build_rung(count_tokens, length, questions)
    assert request is not None
    assert length - 2 <= count_tokens(request) <= length
    assert len(request["questions"]) == questions


def test_a_rung_too_short_for_its_questions_is_left_out() -> None:
    assert build_rung(count_tokens, 100, 16) is None
    assert build_rung(count_tokens, 100, 1) is not None


def test_a_tokenizer_that_counts_unevenly_is_still_kept_under_the_length() -> None:
    def uneven(request: dict[str, Any]) -> int:
        words = request["state"].count("evidence")
        return 50 + words + (words > 900) * words

    request = build_rung(uneven, 1500, 1)
    assert request is not None
    assert uneven(request) <= 1500


def climb_with(outcomes: dict[int, Exception]) -> tuple[Any, list[str]]:
    told: list[str] = []

    def score(request: dict[str, Any]) -> tuple[dict[str, Any], str]:
        tokens = count_tokens(request)
        for limit, error in outcomes.items():
            if tokens > limit:
                raise error
        return {"usage": {"input_tokens": tokens}}, "hash"

    return climb((300, 1024), score, count_tokens, told.append), told


def test_every_rung_is_scored_reported_and_told_to_systemd(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        rungs, told = climb_with({})
    assert told == [
        "warm-up ladder 1/2: 300 tokens",
        "warm-up ladder 2/2: 1024 tokens",
    ]
    shapes = [(rung["questions"], rung["outcome"]) for rung in rungs]
    assert shapes == [(1, "scored"), (1, "scored"), (16, "scored")]
    assert len(caplog.records) == 3
    assert all(" s" in record.getMessage() for record in caplog.records)


def test_a_rung_the_cap_has_no_room_for_is_told_and_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        rungs, _ = climb_with({500: OutOfMemory("full")})
    assert [(rung["tokens"], rung["outcome"]) for rung in rungs[1:]] == [
        (1024, "out_of_memory"),
        (1024, "out_of_memory"),
    ]
    assert "1024 tokens do not fit under INTERN_DECISION_VRAM_CAP_GIB" in caplog.text


def test_any_other_failure_of_a_rung_refuses() -> None:
    with pytest.raises(StartupRefused, match="warm-up at 1024 tokens: it broke"):
        climb_with({500: ScoringFailed("it broke")})
