"""Load, score, fail, release and lose the engine: engine.py on a fake torch."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_harness import PINS, REQUEST, Harness, make_modeling
from fake_torch import MIB, FakeTorch, OutOfMemoryError

from intern_decision_serve import kernels
from intern_decision_serve.engine import Engine
from intern_decision_serve.errors import (
    DeviceAbsent,
    EngineFailed,
    InvalidRequest,
    OutOfMemory,
    ScoringFailed,
    ServiceError,
    StartupRefused,
)
from intern_decision_serve.prompt import hash_prompt
from intern_decision_serve.warmup import WARMUP

WEIGHTS = 1024 * MIB
WARMUP_WORD = "cold"  # in the state of the warm-up, in no request of these tests


@pytest.fixture(scope="module", autouse=True)
def nothing_of_this_process_is_frozen() -> Iterator[None]:
    """The harness stands in for gc.freeze: no engine here may reach the real one."""
    before = gc.get_freeze_count()
    yield
    assert gc.get_freeze_count() <= before


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    return Harness(tmp_path, monkeypatch)


@pytest.fixture
def engine(harness: Harness) -> Engine:
    return harness.load()


def raising(error: Exception, *, warmup_too: bool = False) -> Callable[[str], None]:
    """A hook that fails every call, or every call but the warm-up."""

    def hook(text: str) -> None:
        if warmup_too or WARMUP_WORD not in text:
            raise error

    return hook


def fail(engine: Engine, expected: type[ServiceError]) -> ServiceError:
    with pytest.raises(expected) as failure:
        engine.score(REQUEST)
    assert type(failure.value) is expected
    assert failure.value.__cause__ is None
    assert failure.value.__context__ is None
    return failure.value


# Engine against a fake torch: scoring and its failures (INV-4)


def test_an_answer_is_predicts_response_untouched_with_the_prompts_hash(
    harness: Harness, engine: Engine
) -> None:
    response, prompt_sha256 = engine.score(REQUEST)
    direct = engine._decision_engine.predict(REQUEST)
    assert {**response, "timing": None} == {**direct, "timing": None}
    compiled = harness.inference.compile_row(REQUEST)
    assert prompt_sha256 == hash_prompt(compiled.messages[0]["content"])


def test_an_oom_is_reraised_unchained_and_empty_cache_runs_after_its_tensors_died(
    harness: Harness, engine: Engine
) -> None:
    cuda = harness.torch.cuda
    sentinels: list[weakref.ref[Any]] = []

    def exhaust(text: str) -> None:
        held = harness.torch.allocate(2048, "cuda")
        sentinels.append(weakref.ref(held))
        harness.torch.allocate(100_000, "cuda")

    harness.control.in_forward = exhaust
    cuda.events.clear()
    failure = fail(engine, OutOfMemory)
    assert failure.message == "the request does not fit in the GPU's memory"
    assert failure.retry_after is None
    assert cuda.events == ["empty_cache"]
    assert cuda.live_at_empty_cache[-1] == WEIGHTS
    assert cuda.reserved == WEIGHTS
    assert sentinels[0]() is None


def test_fifty_ooms_in_a_row_leave_the_baseline_and_an_engine_that_answers(
    harness: Harness, engine: Engine
) -> None:
    harness.control.in_forward = raising(OutOfMemoryError("CUDA out of memory"))
    for _ in range(50):
        fail(engine, OutOfMemory)
        assert harness.torch.cuda.reserved == WEIGHTS
    harness.control.in_forward = lambda text: None
    assert engine.score(REQUEST)[0]["answers"]


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory",
        "Out of memory here\nmore",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
    ],
)
def test_a_runtime_error_saying_out_of_memory_becomes_out_of_memory(
    harness: Harness, engine: Engine, message: str
) -> None:
    harness.control.in_forward = raising(RuntimeError(message))
    fail(engine, OutOfMemory)


@pytest.mark.parametrize("stage", ["before_forward", "in_forward", "after_forward"])
@pytest.mark.parametrize(
    "error", [RuntimeError("shapes"), KeyError("q"), RecursionError(), MemoryError()]
)
def test_another_failure_becomes_scoring_failed_unchained_and_is_released(
    harness: Harness, engine: Engine, stage: str, error: Exception
) -> None:
    setattr(harness.control, stage, raising(error))
    harness.torch.cuda.events.clear()
    failure = fail(engine, ScoringFailed)
    assert failure.message == "the model failed to score this request"
    assert harness.torch.cuda.events == ["empty_cache"]


@pytest.mark.parametrize("error", [RuntimeError, OutOfMemoryError, ValueError])
def test_the_tensors_of_a_failed_call_are_dead_at_empty_cache_though_it_was_logged(
    harness: Harness,
    engine: Engine,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
) -> None:
    sentinels: list[weakref.ref[Any]] = []

    def leak(text: str) -> None:
        if WARMUP_WORD in text:
            return
        held = harness.torch.allocate(512, "cuda")
        cycle = [held]
        cycle.append(cycle)  # type: ignore[arg-type]
        sentinels.append(weakref.ref(held))
        try:
            raise KeyError(held)
        except KeyError as inner:
            raise error("broken", held) from inner

    harness.control.in_forward = leak
    with caplog.at_level(logging.DEBUG), pytest.raises(ServiceError):
        engine.score(REQUEST)
    assert sentinels[0]() is None
    assert harness.torch.cuda.live_at_empty_cache[-1] == WEIGHTS
    assert all(record.exc_info is None for record in caplog.records)


def test_a_failure_is_logged_with_its_traceback_and_no_word_of_the_request(
    harness: Harness, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    harness.control.in_forward = raising(RuntimeError("shapes do not match"))
    with caplog.at_level(logging.DEBUG), pytest.raises(ScoringFailed):
        engine.score({"state": "very secret", "questions": {"q": {}}})
    assert "Traceback (most recent call last)" in caplog.text
    assert "RuntimeError: shapes do not match" in caplog.text
    assert "very secret" not in caplog.text


@pytest.mark.parametrize("stage", ["before_forward", "in_forward"])
def test_a_value_error_keeps_its_message_but_is_released_and_raised_unchained(
    harness: Harness, engine: Engine, stage: str
) -> None:
    setattr(harness.control, stage, raising(ValueError("prompt of 9 tokens, limit 4")))
    harness.torch.cuda.events.clear()
    failure = fail(engine, InvalidRequest)
    assert failure.message == "prompt of 9 tokens, limit 4"
    assert harness.torch.cuda.events == ["empty_cache"]
    assert harness.torch.cuda.live_at_empty_cache[-1] == WEIGHTS


def test_the_token_limit_is_the_models_own_value_error(harness: Harness) -> None:
    engine = harness.load(max_tokens=50)
    with pytest.raises(InvalidRequest, match="prompt of 61 tokens, limit 50"):
        engine.score({"state": "word " * 60, "questions": {}})


@pytest.mark.parametrize(
    "error", [ValueError("Invalid probability distribution"), ArithmeticError("moved")]
)
def test_a_distribution_that_is_none_is_the_models_fault_not_the_clients(
    harness: Harness, engine: Engine, error: Exception
) -> None:
    harness.control.after_forward = raising(error)
    failure = fail(engine, ScoringFailed)
    assert failure.message == "the model failed to score this request"


def test_a_value_error_of_the_next_call_is_the_clients_again(
    harness: Harness, engine: Engine
) -> None:
    engine.score(REQUEST)
    harness.control.before_forward = raising(ValueError("limit"))
    fail(engine, InvalidRequest)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"questions": {}}, "no state"),
        ({"state": "a <decision>", "questions": {}}, "<decision> is reserved"),
        (
            {"state": {1, 2}, "questions": {}},
            "the request cannot be turned into a prompt: TypeError",
        ),
        (
            {"state": "a"},
            "the request cannot be turned into a prompt: KeyError",
        ),
    ],
)
def test_a_request_the_prompt_builder_rejects_never_reaches_the_model(
    harness: Harness, engine: Engine, request_: dict[str, Any], message: str
) -> None:
    calls = harness.control.calls
    with pytest.raises(InvalidRequest) as refusal:
        engine.score(request_)
    assert refusal.value.message == message
    assert refusal.value.__context__ is None
    assert harness.control.calls == calls


def test_validate_runs_the_pinned_validation_alone(
    harness: Harness, engine: Engine
) -> None:
    calls = harness.control.calls
    engine.validate(REQUEST)
    with pytest.raises(InvalidRequest, match="no state"):
        engine.validate({"questions": {}})
    with pytest.raises(InvalidRequest, match="into a prompt: KeyError"):
        engine.validate({"state": "a"})
    assert harness.control.calls == calls


@pytest.mark.parametrize(("burst_mib", "released"), [(512, False), (513, True)])
def test_a_burst_over_baseline_plus_slack_is_released_and_one_at_it_is_left_alone(
    harness: Harness, engine: Engine, burst_mib: int, released: bool
) -> None:
    cuda = harness.torch.cuda
    cuda.events.clear()
    assert cuda.reserved == WEIGHTS

    def burst(text: str) -> None:
        before = cuda.memory_allocated()
        harness.torch.allocate(burst_mib - (before - WEIGHTS) // MIB, "cuda")

    harness.control.in_forward = burst
    engine.score(REQUEST)
    assert cuda.events == (["empty_cache"] if released else [])


def test_memory_is_the_allocators_counters_in_mib(engine: Engine) -> None:
    assert engine.memory() == {
        "baseline_mib": 1024.0,
        "allocated_mib": 1024.0,
        "reserved_mib": 1024.0,
        "peak_mib": 1124.0,
    }


# A lost engine


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: device-side assert triggered",
        "CUDA error: an illegal memory access was encountered",
        "block INTERNAL ASSERT FAILED at CUDACachingAllocator",
    ],
)
def test_an_error_cuda_does_not_recover_from_loses_the_engine_at_once(
    harness: Harness, engine: Engine, message: str
) -> None:
    harness.control.in_forward = raising(RuntimeError(message))
    calls = harness.control.calls
    harness.torch.cuda.events.clear()
    failure = fail(engine, EngineFailed)
    assert failure.message == "the engine is lost"
    assert failure.retry_after == 60
    assert harness.control.calls == calls + 1
    assert harness.torch.cuda.events == []


def test_nothing_is_scored_on_a_lost_context(harness: Harness, engine: Engine) -> None:
    harness.control.in_forward = raising(RuntimeError("CUDA error: gone"))
    fail(engine, EngineFailed)
    harness.control.in_forward = lambda text: None
    calls = harness.control.calls
    fail(engine, EngineFailed)
    with pytest.raises(EngineFailed):
        engine.canary()
    assert harness.control.calls == calls


def test_after_an_unknown_failure_the_warm_up_decides_well(
    harness: Harness, engine: Engine
) -> None:
    harness.control.in_forward = raising(RuntimeError("odd"))
    calls = harness.control.calls
    fail(engine, ScoringFailed)
    assert harness.control.calls == calls + 2
    harness.control.in_forward = lambda text: None
    assert engine.score(REQUEST)


def test_a_warm_up_that_fails_too_loses_the_engine(
    harness: Harness, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    harness.control.in_forward = raising(RuntimeError("odd"), warmup_too=True)
    fail(engine, EngineFailed)
    assert "no longer scores as it did: it fails: RuntimeError" in caplog.text


def test_a_warm_up_that_answers_otherwise_loses_the_engine(
    harness: Harness, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    harness.control.before_forward = raising(RuntimeError("odd"))
    harness.control.drift = [1]
    fail(engine, EngineFailed)
    assert "answers.q.probabilities.alarm: " in caplog.text


@pytest.mark.parametrize("error", [OutOfMemoryError("full"), ValueError("limit")])
def test_neither_an_oom_nor_a_value_error_asks_for_the_warm_up(
    harness: Harness, engine: Engine, error: Exception
) -> None:
    harness.control.in_forward = raising(error)
    calls = harness.control.calls
    with pytest.raises(ServiceError):
        engine.score(REQUEST)
    assert harness.control.calls == calls + 1


def test_memory_that_cannot_be_released_loses_the_engine(
    harness: Harness, engine: Engine
) -> None:
    harness.control.in_forward = raising(OutOfMemoryError("CUDA out of memory"))
    harness.torch.cuda.broken = True
    fail(engine, EngineFailed)


def test_a_context_found_lost_after_the_answer_loses_the_engine(
    harness: Harness, engine: Engine
) -> None:
    def burst(text: str) -> None:
        harness.torch.allocate(2000, "cuda")
        harness.torch.cuda.broken = True

    harness.control.in_forward = burst
    fail(engine, EngineFailed)


def test_the_canary_scores_the_warm_up_again(harness: Harness, engine: Engine) -> None:
    calls = harness.control.calls
    engine.canary()
    assert harness.control.calls == calls + 1
    harness.control.drift = [1]
    with pytest.raises(EngineFailed):
        engine.canary()


# Engine load (INV-3, 4, 7, 8)


def test_a_wrong_inference_hash_refuses_and_executes_nothing(harness: Harness) -> None:
    code = harness.snapshot / "inference.py"
    code.write_bytes(code.read_bytes().replace(b"Fake-Decision", b"Fake-Decisiom"))
    with pytest.raises(StartupRefused, match="sha256"):
        harness.load()
    assert not hasattr(harness, "control")


def test_a_checkpoint_path_that_is_not_the_pinned_snapshot_refuses(
    harness: Harness, tmp_path: Path
) -> None:
    other = tmp_path / "snapshots" / ("e" * 40)
    harness.snapshot.rename(other)
    with pytest.raises(StartupRefused, match="snapshots"):
        harness.load(checkpoint=str(other))
    assert not hasattr(harness, "control")


def test_the_cap_is_applied_before_the_engine_is_constructed(harness: Harness) -> None:
    harness.load(vram_cap_gib=4.0)
    assert harness.torch.cuda.events[:3] == ["set_device 0", "cap 0.2500", "construct"]


def test_a_cap_larger_than_the_card_refuses_before_the_weights(
    harness: Harness,
) -> None:
    with pytest.raises(StartupRefused, match="INTERN_DECISION_VRAM_CAP_GIB is 17"):
        harness.load(vram_cap_gib=17.0)
    assert harness.control.constructed == []


def test_a_cap_smaller_than_the_weights_refuses_by_name(harness: Harness) -> None:
    with pytest.raises(StartupRefused) as refusal:
        harness.load(vram_cap_gib=0.5)
    assert str(refusal.value) == (
        "the weights do not fit: INTERN_DECISION_VRAM_CAP_GIB is 0.5"
    )
    assert refusal.value.exit_status == 78


@pytest.mark.parametrize("cap_gib", [None, 4.0])
def test_a_card_that_others_fill_is_worth_a_restart(
    harness: Harness, cap_gib: float | None
) -> None:
    harness.torch.cuda.others = 15_500 * MIB
    with pytest.raises(DeviceAbsent, match="no room left for the weights"):
        harness.load(vram_cap_gib=cap_gib)


def test_a_card_that_fails_while_loading_is_worth_a_restart(harness: Harness) -> None:
    def fail(entry: Any) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    def plant(control: Any) -> None:
        control.constructed = types.SimpleNamespace(append=fail)

    harness.plant = plant
    with pytest.raises(DeviceAbsent, match="the card failed at the weights"):
        harness.load()


def test_a_cap_too_small_for_the_warm_up_refuses_by_name(harness: Harness) -> None:
    with pytest.raises(StartupRefused, match="the warm-up does not fit"):
        harness.load(vram_cap_gib=(1024 + 64 + 5) / 1024)


def test_max_tokens_arrives_as_max_length(harness: Harness) -> None:
    harness.load(max_tokens=1234, device="cuda:0")
    assert harness.control.constructed == [(str(harness.snapshot), 1234, "cuda:0")]


def test_a_checkpoint_that_does_not_load_refuses_in_one_line(harness: Harness) -> None:
    def plant(control: Any) -> None:
        control.constructed = types.SimpleNamespace(append=lambda _: 1 / 0)

    harness.plant = plant
    with pytest.raises(StartupRefused) as refusal:
        harness.load()
    assert str(refusal.value) == (
        "the checkpoint does not load: ZeroDivisionError: division by zero"
    )


def test_progress_bars_stay_out_of_the_journal(harness: Harness) -> None:
    hidden: list[int] = []
    bars = types.SimpleNamespace(disable_progress_bar=lambda: hidden.append(1))
    harness.put("transformers.utils.logging", bars)
    harness.load()
    assert hidden == [1]


@pytest.mark.parametrize(("device", "devices"), [("cuda", 0), ("cuda:1", 1)])
def test_a_device_that_is_not_there_is_absent_before_the_weights(
    harness: Harness, device: str, devices: int
) -> None:
    harness.torch.cuda.devices = devices
    with pytest.raises(DeviceAbsent):
        harness.load(device=device)
    assert harness.control.constructed == []


def test_a_torch_that_is_missing_refuses(harness: Harness) -> None:
    harness.put("torch", None)
    with pytest.raises(StartupRefused, match="torch does not import: .*'demo' extra"):
        harness.load()


def test_a_model_that_is_not_on_cuda_refuses(harness: Harness) -> None:
    harness.plant = lambda control: setattr(control, "weight_device", "cpu")
    with pytest.raises(StartupRefused, match="not on the asked device cuda:0"):
        harness.load()


def test_a_wrong_architecture_refuses_before_the_first_call(harness: Harness) -> None:
    harness.torch.cuda.arch_list = ("sm_80",)
    with pytest.raises(StartupRefused, match="no code for this card's sm_90"):
        harness.load()
    assert harness.control.calls == 0


def test_a_slow_kernel_refuses_before_the_weights(harness: Harness) -> None:
    modeling = make_modeling(causal_conv1d_fn=kernels.MODELING)
    harness.put(kernels.MODELING, modeling)
    with pytest.raises(StartupRefused, match="causal_conv1d_fn"):
        harness.load()
    assert harness.control.constructed == []


def test_a_slow_kernel_serves_with_the_switch_and_says_so(harness: Harness) -> None:
    modeling = make_modeling(causal_conv1d_fn=kernels.MODELING)
    harness.put(kernels.MODELING, modeling)
    report = harness.load(allow_slow_kernels=True).kernels["causal_conv1d_fn"]
    assert report["fast"] is False
    assert report["allowed_by"] == "INTERN_DECISION_ALLOW_SLOW_KERNELS=1"


def test_one_warm_up_decision_must_score(harness: Harness) -> None:
    def plant(control: Any) -> None:
        control.in_forward = raising(RuntimeError("broken"), warmup_too=True)

    harness.plant = plant
    with pytest.raises(StartupRefused, match="the warm-up does not score: "):
        harness.load()


def test_a_context_lost_in_the_warm_up_is_worth_a_restart(harness: Harness) -> None:
    def plant(control: Any) -> None:
        control.in_forward = raising(RuntimeError("CUDA error: ecc"), warmup_too=True)

    harness.plant = plant
    with pytest.raises(DeviceAbsent):
        harness.load()


def test_the_warm_up_settles_before_it_is_the_reference(harness: Harness) -> None:
    harness.plant = lambda control: setattr(control, "drift", [1, 2])
    engine = harness.load()
    assert engine.warmup["settle_calls"] == 4


def test_the_vision_swap_refuses_when_the_warm_up_changes(harness: Harness) -> None:
    harness.plant = lambda control: setattr(control, "visual_matters", True)
    with pytest.raises(StartupRefused) as refusal:
        harness.load()
    assert "changed when the vision tower was dropped" in str(refusal.value)
    assert "answers.q.probabilities.alarm: " in str(refusal.value)
    assert "INTERN_DECISION_KEEP_VISION=1" in str(refusal.value)


def test_the_dropped_tower_is_freed_and_raises_if_it_is_ever_called(
    harness: Harness, engine: Engine
) -> None:
    assert harness.torch.cuda.memory_allocated() == WEIGHTS
    model = engine._decision_engine.backend.model.model
    with pytest.raises(RuntimeError, match="vision tower was dropped"):
        model.visual("pixels")
    assert engine.warmup["vision"] == "dropped"


def test_keep_vision_keeps_the_tower(harness: Harness) -> None:
    harness.plant = lambda control: setattr(control, "visual_matters", True)
    engine = harness.load(keep_vision=True)
    visual = engine._decision_engine.backend.model.model.visual
    assert type(visual) is harness.inference.Visual
    assert harness.torch.cuda.memory_allocated() == WEIGHTS + 64 * MIB
    assert engine.warmup["vision"] == "kept"


def test_the_prompt_hash_check_refuses_on_a_token_count_mismatch(
    harness: Harness,
) -> None:
    harness.plant = lambda control: setattr(control, "extra_tokens", 1)
    with pytest.raises(StartupRefused, match="tokens"):
        harness.load()


def test_the_ladder_is_climbed_before_the_baseline_and_told(harness: Harness) -> None:
    engine = harness.load(warmup_tokens=(512, 1024))
    assert [rung["tokens"] for rung in engine.warmup["rungs"]] == [512, 512, 1024, 1024]
    assert harness.progress == [
        "importing torch and the checkpoint's code",
        "loading the weights",
        "settling the warm-up",
        "dropping the vision tower",
        "warm-up ladder 1/2: 512 tokens",
        "warm-up ladder 2/2: 1024 tokens",
    ]
    assert engine.memory()["baseline_mib"] == 1024.0
    assert engine.memory()["reserved_mib"] == 1024.0


def test_a_cap_too_small_for_a_rung_says_so_and_serves(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    engine = harness.load(warmup_tokens=(128, 1024), vram_cap_gib=1.5)
    outcomes = [(rung["tokens"], rung["outcome"]) for rung in engine.warmup["rungs"]]
    assert (1024, "out_of_memory") in outcomes
    assert outcomes[0] == (128, "scored")
    assert "1024 tokens do not fit" in caplog.text
    assert engine.score(REQUEST)


def test_expandable_segments_are_gone_before_torch_is_imported(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    harness.load()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


def test_the_model_object_describes_what_serves(engine: Engine) -> None:
    assert engine.description == {
        "name": "Fake-Decision",
        "source": "nobody/Fake-Decision",
        "revision": PINS.revision,
        "dtype": "bfloat16",
        "device": "Fake H200",
        "torch_version": "2.10.0+fake",
        "transformers_version": "5.17.0",
        "serving_config": (
            "transformers, bfloat16, sdpa, text only, one inference thread"
        ),
        "inference_sha256": PINS.inference_sha256,
        "chat_template_sha256": hash_prompt("{{ messages }}"),
    }


def test_the_longest_token_counts_added_ones(engine: Engine) -> None:
    assert engine.longest_token == len("<decision>")


def test_the_cpu_serves_when_asked_for_and_asks_nothing_of_cuda(
    harness: Harness,
) -> None:
    harness.torch = FakeTorch(devices=0)
    harness.put("torch", harness.torch)
    harness.put(kernels.MODELING, types.ModuleType(kernels.MODELING))
    engine = harness.load(device="cpu")
    assert engine.description["device"] == "cpu"
    assert not any(report["fast"] for report in engine.kernels.values())
    assert set(engine.memory().values()) == {None}
    assert engine.score(REQUEST)
    harness.control.in_forward = raising(RuntimeError("odd"))
    fail(engine, ScoringFailed)
    assert harness.torch.cuda.events == ["construct"]


def test_startup_scores_the_warm_up_alone(harness: Harness, engine: Engine) -> None:
    # settle twice, re-score once, canary once
    assert harness.control.calls == 4
    assert engine.score(WARMUP)


def test_importing_the_engine_imports_no_torch() -> None:
    code = (
        "import sys, intern_decision_serve.engine;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
