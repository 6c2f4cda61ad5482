"""Encode ahead on the fake checkpoint: own tokenizer, own thread: encoder.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_harness import REQUEST, Harness

from intern_decision_serve.encoder import (
    SHORTEST_PREPARED_BYTES,
    EncodeAhead,
    Prepared,
    is_worth_preparing,
    make_preparer,
)
from intern_decision_serve.engine import Engine
from intern_decision_serve.errors import InvalidRequest
from intern_decision_serve.prompt import hash_prompt

LONG = {"state": "word " * 2000, "questions": REQUEST["questions"]}
TOO_LONG = {"state": "word " * 5000, "questions": REQUEST["questions"]}


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    return Harness(tmp_path, monkeypatch)


@pytest.fixture
def engine(harness: Harness) -> Engine:
    return harness.load()


def request_of(characters: int, letter: str = "x") -> dict[str, Any]:
    return {"state": letter * characters, "questions": {}}


@pytest.mark.parametrize(
    ("request_", "worth"),
    [
        (request_of(100), False),
        (request_of(SHORTEST_PREPARED_BYTES), True),
        (request_of(SHORTEST_PREPARED_BYTES // 2, "é"), True),
        (request_of(SHORTEST_PREPARED_BYTES // 2), False),
        (request_of(SHORTEST_PREPARED_BYTES, "\ud800"), True),
    ],
)
def test_only_a_long_request_is_worth_preparing(
    request_: dict[str, Any], worth: bool
) -> None:
    assert is_worth_preparing(request_) is worth


def test_a_short_request_is_left_alone(engine: Engine) -> None:
    assert engine.prepare(REQUEST) is None


def test_a_prepared_call_scores_as_the_same_call_unprepared(
    harness: Harness, engine: Engine
) -> None:
    prepared = engine.prepare(LONG)
    assert isinstance(prepared, Prepared)
    encodes = harness.count_encodes(engine)
    plain, plain_hash = engine.score(LONG)
    assert encodes == [1]
    ahead, ahead_hash = engine.score(LONG, prepared)
    assert encodes == [1]
    assert {**ahead, "timing": None} == {**plain, "timing": None}
    assert ahead_hash == plain_hash == prepared.prompt_sha256


def test_what_was_prepared_serves_one_call_of_that_very_request(
    harness: Harness, engine: Engine
) -> None:
    prepared = engine.prepare(LONG)
    encodes = harness.count_encodes(engine)
    copy = dict(LONG)
    engine.score(copy, prepared)
    assert encodes == [1]
    engine.score(LONG, prepared)
    engine.score(REQUEST)
    assert encodes == [1, 1]


def test_a_failed_prepared_call_leaves_nothing_for_the_next(
    harness: Harness, engine: Engine
) -> None:
    prepared = engine.prepare(LONG)

    def refuse(text: str) -> None:
        raise ValueError("not now")

    harness.control.before_forward = refuse
    with pytest.raises(InvalidRequest, match="not now"):
        engine.score(LONG, prepared)
    harness.control.before_forward = lambda text: None
    encodes = harness.count_encodes(engine)
    engine.score(REQUEST)
    assert encodes == [1]


def test_an_over_long_prompt_is_refused_before_it_waits(
    harness: Harness, engine: Engine
) -> None:
    calls = harness.control.calls
    with pytest.raises(InvalidRequest) as refusal:
        engine.prepare(TOO_LONG)
    assert refusal.value.message == "prompt of 5003 tokens, limit 4096"
    assert refusal.value.__context__ is None
    assert harness.control.calls == calls


def test_any_other_failure_to_encode_is_the_requests_and_leaks_nothing(
    engine: Engine,
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        engine.prepare({"state": "word " * 2000, "questions": 7})
    assert refusal.value.message == (
        "the request cannot be turned into a prompt: TypeError"
    )


def test_the_encoder_uses_a_tokenizer_and_device_of_its_own(engine: Engine) -> None:
    backend = engine._decision_engine.backend
    preparer = engine._preparer
    assert preparer is not None
    shadow = preparer._shadow
    assert shadow.tokenizer is not backend.tokenizer
    assert shadow.processor is shadow.tokenizer
    assert str(shadow.device) == "cpu"
    assert shadow.model is None
    assert type(shadow) is type(backend)


def test_preparing_touches_no_cuda_and_the_inference_thread_moves_the_tensors(
    harness: Harness, engine: Engine
) -> None:
    cuda = harness.torch.cuda
    before = (cuda.memory_allocated(), cuda.peak, list(cuda.events))
    prepared = engine.prepare(LONG)
    assert prepared is not None
    assert (cuda.memory_allocated(), cuda.peak, list(cuda.events)) == before
    batch = prepared.encoded[1]
    assert batch["input_ids"].device.type == "cpu"
    ahead = EncodeAhead(lambda row: None, harness.torch.device("cuda"))
    ahead.prepared = prepared
    compiled, moved, positions = ahead("row")
    assert moved["input_ids"].device.type == "cuda"
    assert moved["input_ids"].values == batch["input_ids"].values
    assert compiled is prepared.encoded[0]
    assert positions == prepared.encoded[2]


def test_tensors_are_moved_in_a_batch_of_any_usual_shape(harness: Harness) -> None:
    tensor = harness.torch.allocate(1)
    batch = {"ids": tensor, "parts": [tensor, (tensor, "text")], "count": 3}
    ahead = EncodeAhead(lambda row: None, harness.torch.device("cuda"))
    ahead.prepared = Prepared({}, "hash", (batch,))
    (moved,) = ahead("row")
    assert moved["ids"].device.type == "cuda"
    assert moved["parts"][0].device.type == "cuda"
    assert moved["parts"][1][0].device.type == "cuda"
    assert (moved["parts"][1][1], moved["count"]) == ("text", 3)


def test_a_shadow_that_encodes_otherwise_turns_encode_ahead_off(
    engine: Engine, harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    backend = engine._decision_engine.backend

    def otherwise(row: Any) -> Any:
        compiled, batch, positions = type(backend).encode(backend, row)
        return compiled, batch, [place + 1 for place in positions]

    assert make_preparer(harness.inference, backend, otherwise) is None
    assert "encode-ahead is off" in caplog.text


def test_a_backend_that_cannot_be_shadowed_turns_encode_ahead_off(
    engine: Engine, harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    backend = engine._decision_engine.backend
    backend.device = object()
    assert make_preparer(harness.inference, backend, backend.encode) is None
    assert "encode-ahead is off" in caplog.text


def test_without_a_shadow_every_call_encodes_as_ever(
    engine: Engine, harness: Harness
) -> None:
    engine._preparer = None
    assert engine.prepare(LONG) is None
    assert engine.score(LONG)[0]["usage"]["input_tokens"] == 2003


def test_the_prepared_hash_is_of_the_rendered_text(
    engine: Engine, harness: Harness
) -> None:
    compiled = harness.inference.compile_row(LONG)
    prepared = engine.prepare(LONG)
    assert prepared is not None
    assert prepared.prompt_sha256 == hash_prompt(compiled.messages[0]["content"])
