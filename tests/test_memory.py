"""Failures sorted, frames dropped, blocks given back: memory.py on the fake torch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from fake_torch import MIB, FakeTorch, OutOfMemoryError

from intern_decision_serve.memory import (
    Memory,
    drop_frames,
    format_failure,
    is_context_lost,
    is_out_of_memory,
)


class AcceleratorError(RuntimeError):
    """torch.AcceleratorError, which newer versions raise for every CUDA error."""


@pytest.fixture(autouse=True)
def own_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: None)


OUT_OF_MEMORY = [
    OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("CUDA out of memory"),
    RuntimeError("cuda Out Of Memory while capturing\nmore lines"),
    RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
]
CONTEXT_LOST = [
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("!block->expandable_segment_ INTERNAL ASSERT FAILED at allocator"),
    AcceleratorError("device gone"),
]
NEITHER = [
    RuntimeError("expected scalar type Half\nbut found: out of memory"),
    ValueError("out of memory"),
    ValueError("CUDA error: in a client's text"),
    RuntimeError("CUDA error: invalid configuration argument"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling gemm"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    KeyError("q"),
]


def torch_with_accelerator_error() -> FakeTorch:
    torch = FakeTorch()
    torch.AcceleratorError = AcceleratorError  # type: ignore[attr-defined]
    return torch


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_every_form_of_an_exhausted_card_is_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(FakeTorch(), error)


@pytest.mark.parametrize("error", NEITHER + CONTEXT_LOST, ids=str)
def test_no_other_failure_is_out_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(FakeTorch(), error)


@pytest.mark.parametrize("error", CONTEXT_LOST, ids=str)
def test_an_error_cuda_keeps_is_a_lost_context(error: Exception) -> None:
    assert is_context_lost(torch_with_accelerator_error(), error)


@pytest.mark.parametrize("error", NEITHER, ids=str)
def test_a_failure_of_one_call_is_no_lost_context(error: Exception) -> None:
    assert not is_context_lost(torch_with_accelerator_error(), error)


def test_a_torch_without_the_newer_classes_is_judged_by_messages() -> None:
    torch = FakeTorch()
    del FakeTorch.OutOfMemoryError
    try:
        assert is_out_of_memory(torch, RuntimeError("CUDA out of memory"))
    finally:
        FakeTorch.OutOfMemoryError = OutOfMemoryError


class Sentinel:
    """Stands for a tensor: dead or alive."""


def fail_with_chain(sentinels: list[weakref.ref[Sentinel]]) -> None:
    """Fail with a tensor in each frame of a chain, in the arguments and in a cycle."""

    def inner() -> None:
        held = Sentinel()
        sentinels.append(weakref.ref(held))
        raise KeyError(held)

    held = Sentinel()
    cycle = [held]
    cycle.append(cycle)  # type: ignore[arg-type]
    sentinels.append(weakref.ref(held))
    try:
        inner()
    except KeyError as error:
        raise RuntimeError("forward failed", held) from error


def test_dropped_frames_hold_no_tensor_even_while_the_error_lives() -> None:
    sentinels: list[weakref.ref[Sentinel]] = []
    kept: list[BaseException] = []
    try:
        fail_with_chain(sentinels)
    except RuntimeError as error:
        drop_frames(error)
        kept.append(error)
    gc.collect()
    assert [sentinel() for sentinel in sentinels] == [None, None]
    assert kept[0].__traceback__ is kept[0].__context__ is kept[0].__cause__ is None


def test_a_chain_that_bites_its_tail_is_dropped_once() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    drop_frames(first)
    assert first.__cause__ is second.__cause__ is None


def test_a_formatted_failure_has_the_traceback_and_keeps_nothing() -> None:
    sentinels: list[weakref.ref[Sentinel]] = []
    try:
        fail_with_chain(sentinels)
    except RuntimeError as error:
        text = format_failure(error)
        drop_frames(error)
    gc.collect()
    assert "fail_with_chain" in text and "RuntimeError" in text and "KeyError" in text
    assert [sentinel() for sentinel in sentinels] == [None, None]


@pytest.fixture
def torch() -> Iterator[FakeTorch]:
    yield FakeTorch()


def with_baseline(torch: FakeTorch, slack_mib: int = 512) -> Memory:
    memory = Memory(torch, 0, slack_mib=slack_mib)
    memory.set_baseline()
    torch.cuda.events.clear()
    return memory


@pytest.mark.parametrize(
    ("burst_mib", "released"), [(512, False), (513, True), (0, False), (2000, True)]
)
def test_a_burst_over_baseline_plus_slack_is_released_one_at_it_is_left(
    torch: FakeTorch, burst_mib: int, released: bool
) -> None:
    weights = torch.allocate(1000, "cuda")
    memory = with_baseline(torch)
    torch.allocate(burst_mib, "cuda")  # dies at once, stays reserved
    memory.release_excess()
    assert torch.cuda.events == (["empty_cache"] if released else [])
    assert torch.cuda.reserved == (1000 if released else 1000 + burst_mib) * MIB
    assert weights.size == 1000 * MIB


def test_a_slack_of_nothing_releases_every_burst(torch: FakeTorch) -> None:
    memory = with_baseline(torch, slack_mib=0)
    torch.allocate(1, "cuda")
    memory.release_excess()
    assert torch.cuda.events == ["empty_cache"]


def test_release_collects_before_it_gives_blocks_back(torch: FakeTorch) -> None:
    memory = with_baseline(torch)
    cycle = [torch.allocate(64, "cuda")]
    cycle.append(cycle)  # type: ignore[arg-type]
    del cycle
    memory.release()
    assert torch.cuda.live_at_empty_cache[-1] == 0


def test_counters_are_mib(torch: FakeTorch) -> None:
    weights = torch.allocate(1000, "cuda")
    memory = with_baseline(torch)
    more = torch.allocate(50, "cuda")
    torch.allocate(100, "cuda")
    assert memory.counters() == {
        "baseline_mib": 1000.0,
        "allocated_mib": 1050.0,
        "reserved_mib": 1150.0,
        "peak_mib": 1150.0,
    }
    assert weights.size + more.size == 1050 * MIB


def test_on_the_cpu_nothing_is_asked_of_cuda() -> None:
    torch = FakeTorch(devices=0)
    memory = Memory(torch, None, slack_mib=0)
    memory.set_baseline()
    memory.release_excess()
    memory.release()
    assert torch.cuda.events == []
    assert memory.counters() == {
        "baseline_mib": None,
        "allocated_mib": None,
        "reserved_mib": None,
        "peak_mib": None,
    }


def test_the_baseline_freezes_what_startup_built(
    torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: order.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: order.append("freeze"))
    Memory(torch, 0, slack_mib=0).set_baseline()
    assert order == ["collect", "freeze"]
