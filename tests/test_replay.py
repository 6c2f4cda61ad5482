"""Shapes seen, captured, compared, replayed and let go: replay.py on fake graphs."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import queue
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_harness import REQUEST, Harness
from fake_graphs import MIB, Graph, GraphTorch, Model, Tensor
from fake_torch import OutOfMemoryError

from intern_decision_serve import engine as engine_module
from intern_decision_serve.checkpoint import execute_inference, read_inference
from intern_decision_serve.demo import DemoCheckpoint
from intern_decision_serve.engine import Engine
from intern_decision_serve.errors import (
    EngineFailed,
    InvalidRequest,
    OutOfMemory,
    ScoringFailed,
    StartupRefused,
)
from intern_decision_serve.graphs import Recorder
from intern_decision_serve.jobs import Job
from intern_decision_serve.memory import Memory
from intern_decision_serve.pacing import Turns
from intern_decision_serve.replay import (
    LONGEST_TOKENS,
    MOST_SEEN,
    Forward,
    Replay,
    make_replay,
)
from intern_decision_serve.worker import Worker

NO_GRAPHS = {
    "most": 4,
    "held": 0,
    "pool_mib": 0.0,
    "hits": 0,
    "captures": 0,
    "refusals": 0,
    "evictions": 0,
    "drops": 0,
}


@pytest.fixture(autouse=True)
def own_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: None)


class Bench:
    """A replay over the fake model, and calls as the pinned code makes them."""

    def __init__(self, *, most: int = 4, pool_mib: int = 10_000) -> None:
        self.torch = GraphTorch()
        self.cuda = self.torch.cuda
        self.model = Model(self.torch)
        self.memory = Memory(self.torch, 0, slack_mib=512)
        self.memory.set_baseline()
        self.now = 0.0
        self.replay = Replay(
            self.torch,
            0,
            self.model,
            self.memory,
            most=most,
            pool_mib=pool_mib,
            clock=lambda: self.now,
        )
        self._values = itertools.count(1)
        self.cuda.events.clear()

    def arguments(self, tokens: int, fields: int = 1) -> dict[str, Any]:
        """A call no other call has the tokens or the positions of."""
        ids = [next(self._values) for _ in range(tokens)]
        positions = [(ids[0] + field) % tokens for field in range(fields)]
        return {
            "input_ids": self.torch.tensor(ids, 1, tokens),
            "attention_mask": self.torch.tensor([1] * tokens, 1, tokens),
            "use_cache": False,
            "logits_to_keep": self.torch.tensor(positions),
        }

    def check(self, tokens: int, fields: int = 1) -> Tensor:
        """Make one call; its logits are those of the model itself."""
        arguments = self.arguments(tokens, fields)
        logits: Tensor = self.replay(**arguments).logits
        hits = self.counters["hits"]
        events = list(self.cuda.events)
        expected = Model(self.torch)(**arguments).logits
        self.cuda.events[:] = events
        assert (logits.shape, logits.values) == (expected.shape, expected.values)
        assert self.counters["hits"] == hits
        return logits

    def hold(self, tokens: int, fields: int = 1) -> str | None:
        """Make a shape recur and capture it."""
        self.check(tokens, fields)
        self.check(tokens, fields)
        return self.replay.capture()

    @property
    def counters(self) -> dict[str, Any]:
        return self.replay.counters()


@pytest.fixture
def bench() -> Bench:
    return Bench()


class TestOrder:
    def test_a_shape_is_captured_after_its_second_answer_and_replayed_from_then_on(
        self, bench: Bench
    ) -> None:
        bench.check(5)
        assert not bench.replay.is_due
        bench.check(5)
        assert bench.replay.is_due
        assert bench.cuda.events == ["eager", "eager"]
        assert bench.replay.capture() is None
        # the capture, then the one replay that is compared
        assert bench.cuda.events[2:] == [
            "synchronize",
            "empty_cache",
            "captured",
            "replay",
        ]
        assert not bench.replay.is_due
        bench.check(5)
        bench.check(5)
        assert bench.cuda.events[6:] == ["replay", "replay"]
        assert bench.counters == NO_GRAPHS | {
            "held": 1,
            "pool_mib": 5.0,
            "hits": 2,
            "captures": 1,
        }

    def test_nothing_is_captured_without_a_shape_that_recurs(
        self, bench: Bench
    ) -> None:
        for tokens in range(1, 50):
            bench.check(tokens)
        assert not bench.replay.is_due
        assert bench.replay.capture() is None
        assert bench.counters == NO_GRAPHS

    def test_a_shape_is_exact_in_tokens_and_in_fields(self, bench: Bench) -> None:
        bench.hold(5, 2)
        for tokens, fields in ((5, 1), (5, 3), (4, 2), (6, 2)):
            bench.check(tokens, fields)
        assert bench.counters["hits"] == 0
        bench.check(5, 2)
        assert bench.counters["hits"] == 1

    def test_one_sample_waits_and_it_is_the_first(self, bench: Bench) -> None:
        for tokens in (5, 5, 6, 6):
            bench.check(tokens)
        bench.replay.capture()
        bench.check(5)
        assert bench.counters["hits"] == 1
        bench.hold(6)
        bench.check(6)
        assert bench.counters["hits"] == 2

    def test_all_captures_share_one_side_stream(self, bench: Bench) -> None:
        for tokens in (5, 6, 7):
            bench.hold(tokens)
        bench.replay.drop()
        bench.hold(8)
        assert bench.cuda.streams == 1

    def test_capture_leaves_the_default_stream_current(self, bench: Bench) -> None:
        bench.hold(5)
        assert bench.cuda.stream_now == "default"


class TestAnswers:
    def test_many_inputs_over_many_shapes_equal_the_models_own_answers(
        self, bench: Bench
    ) -> None:
        shapes = [(5, 1), (5, 2), (9, 1), (12, 16)]
        for shape in shapes:
            bench.hold(*shape)
        for _ in range(25):
            for shape in shapes:
                bench.check(*shape)
        assert bench.counters["hits"] == 100

    def test_an_answer_is_not_overwritten_by_the_next_one(self, bench: Bench) -> None:
        bench.hold(5)
        logits = bench.check(5)
        before = logits.values
        bench.check(5)
        assert logits.values == before

    def test_the_sample_is_a_copy(self, bench: Bench) -> None:
        bench.check(5)
        arguments = bench.arguments(5)
        output = bench.replay(**arguments)
        assert arguments["logits_to_keep"].values != [0]
        for name in ("input_ids", "logits_to_keep"):
            arguments[name].zero_()
        output.logits.zero_()
        bench.replay.capture()
        assert bench.counters["refusals"] == 0

    def test_a_masked_call_of_a_held_shape_goes_to_the_model(
        self, bench: Bench
    ) -> None:
        bench.hold(5)
        arguments = bench.arguments(5)
        arguments["attention_mask"].write([0, 1, 1, 1, 1])
        bench.replay(**arguments)
        assert bench.cuda.events[-1] == "eager"
        assert bench.counters["hits"] == 0

    @pytest.mark.parametrize(
        "change",
        [
            {"use_cache": True},
            {"use_cache": None},
            {"use_cache": 0},
            {"logits_to_keep": GraphTorch().zeros((0,))},
            {"pixel_values": None},
            {"logits_to_keep": GraphTorch().tensor([1, 2], 1, 2)},
            {"input_ids": GraphTorch().tensor([1, 2], 2, 1)},
            {"attention_mask": GraphTorch().tensor([1] * 4, 1, 4)},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_a_call_of_another_form_goes_to_the_model_untouched(
        self, bench: Bench, change: dict[str, Any]
    ) -> None:
        bench.hold(2)
        arguments = {**bench.arguments(2), **change}
        for _ in range(2):
            bench.replay(**arguments)
            assert bench.cuda.events[-1] == "eager"
        assert not bench.replay.is_due

    def test_a_call_without_tensors_goes_to_the_model(self) -> None:
        calls: list[Any] = []
        torch = GraphTorch()
        memory = Memory(torch, 0, slack_mib=0)

        def model(*args: Any, **kwargs: Any) -> None:
            calls.append((args, kwargs))

        replay = Replay(torch, 0, model, memory, most=1, pool_mib=1)
        arguments = {"attention_mask": 1, "use_cache": False, "logits_to_keep": [0]}
        replay(input_ids=[1], **arguments)
        replay([1])
        assert calls == [((), {"input_ids": [1], **arguments}), (([1],), {})]

    @pytest.mark.parametrize(
        ("tokens", "fields"), [(LONGEST_TOKENS + 1, 1), (20, 17), (8000, 16)]
    )
    def test_a_shape_that_cannot_win_is_left_alone(
        self, bench: Bench, tokens: int, fields: int
    ) -> None:
        bench.hold(tokens, fields)
        bench.check(tokens, fields)
        assert bench.counters == NO_GRAPHS

    def test_the_readme_names_the_longest_length(self) -> None:
        readme = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
        assert f"Lengths over {LONGEST_TOKENS:,} tokens are left alone" in readme

    @pytest.mark.parametrize("rows", [(1, 3), (2, 2)])
    def test_logits_of_another_form_are_no_sample(
        self, bench: Bench, rows: tuple[int, int]
    ) -> None:
        def answer(**_: Any) -> Any:
            return types.SimpleNamespace(logits=bench.torch.zeros((*rows, 3)))

        bench.replay._model = answer
        for _ in range(2):
            bench.replay(**bench.arguments(5, 2))
        assert not bench.replay.is_due

    def test_the_longest_shape_is_replayed(self, bench: Bench) -> None:
        bench.hold(LONGEST_TOKENS, 16)
        bench.check(LONGEST_TOKENS, 16)
        assert bench.counters["hits"] == 1


def one_off(logits: list[float], captured: bool) -> list[float]:
    return [logits[0] + captured, *logits[1:]]


def negative_zero(logits: list[float], captured: bool) -> list[float]:
    return [-0.0 if captured else 0.0] * len(logits)


class TestRefusals:
    @pytest.mark.parametrize("transform", [one_off, negative_zero])
    def test_a_replay_that_differs_by_one_bit_is_never_used(
        self,
        bench: Bench,
        transform: Callable[[list[float], bool], list[float]],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        bench.model.transform = transform
        for _ in range(2):
            bench.replay(**bench.arguments(5))
        with caplog.at_level(logging.WARNING):
            assert bench.replay.capture() is None
        assert caplog.messages == [
            "5 tokens, 1 fields: not replayed: a replay differs from the eager call"
        ]
        for _ in range(3):
            bench.replay(**bench.arguments(5))
            assert bench.cuda.events[-1] == "eager"
            assert not bench.replay.is_due
        assert bench.counters == NO_GRAPHS | {"captures": 1, "refusals": 1}
        assert bench.memory.graph_pool == 0

    def test_a_value_read_at_capture_cannot_pass_for_the_samples(
        self, bench: Bench
    ) -> None:
        bench.model.baked = "ids"
        bench.hold(5)
        assert bench.counters == NO_GRAPHS | {"captures": 1, "refusals": 1}

    @pytest.mark.parametrize("fault", ["ids", "positions", "unwritten"])
    def test_what_the_buffers_held_before_cannot_pass_for_the_samples(
        self, bench: Bench, fault: str
    ) -> None:
        bench.hold(5, 2)
        arguments = bench.arguments(5, 2)
        bench.replay(**arguments)
        assert bench.counters["hits"] == 1  # the buffers hold this very call now
        bench.replay.drop()
        bench.memory.release()
        for _ in range(2):
            bench.replay(**arguments)
        bench.model.baked, bench.cuda.loses_work = fault, fault == "unwritten"
        bench.replay.capture()
        assert (bench.counters["held"], bench.counters["refusals"]) == (0, 1)

    def test_a_nan_is_the_same_nan(self, bench: Bench) -> None:
        bench.model.transform = lambda logits, captured: [math.nan] * len(logits)
        for _ in range(2):
            bench.replay(**bench.arguments(5))
        bench.replay.capture()
        assert bench.counters["held"] == 1

    def test_a_capture_that_breaks_off_leaves_the_allocator_to_eager_calls(
        self, bench: Bench
    ) -> None:
        bench.hold(7)
        bench.model.reads_on_host = True
        fault = "capturing 5 tokens, 1 fields: RuntimeError: CUDA error: capturing"
        assert bench.hold(5) == fault
        assert bench.cuda.stream_now == "default"
        bench.replay.drop()
        bench.memory.release()  # an allocator still in a capture would raise
        assert bench.cuda.memory_reserved() == 0
        assert (bench.counters["held"], bench.counters["refusals"]) == (0, 0)

    def test_a_failure_that_leaves_the_capture_whole_is_told_too(
        self, bench: Bench
    ) -> None:
        def fail(**_: Any) -> None:
            raise KeyError("full_attention")

        bench.check(5)
        bench.check(5)
        bench.replay._recorder._model = fail
        fault = "capturing 5 tokens, 1 fields: KeyError: 'full_attention'"
        assert bench.replay.capture() == fault
        bench.memory.release()
        assert bench.cuda.memory_reserved() == 0

    def test_the_frames_of_a_failed_capture_are_dropped(self, bench: Bench) -> None:
        held: list[weakref.ref[Tensor]] = []

        def fail(**_: Any) -> None:
            activations = bench.torch.zeros((4,))
            held.append(weakref.ref(activations))
            try:
                raise KeyError
            except KeyError as error:
                kept = error  # a cycle: the frame holds what holds the frame
                raise kept from None

        bench.check(5)
        bench.check(5)
        bench.replay._recorder._model = fail
        gc.disable()
        try:
            assert bench.replay.capture() is not None
            assert held[0]() is None
        finally:
            gc.enable()

    @pytest.mark.parametrize("is_told", [True, False])
    def test_a_capture_whose_end_fails_gives_its_pool_back_once(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, is_told: bool
    ) -> None:
        end = Graph.capture_end

        def fail(graph: Graph) -> None:
            end(graph)
            if is_told:
                graph.reset()
            else:  # as where CUDA broke the capture off
                bench.cuda.underway = graph.pool
            raise RuntimeError("cannot instantiate")

        monkeypatch.setattr(Graph, "capture_end", fail)
        fault = "capturing 5 tokens, 1 fields: RuntimeError: cannot instantiate"
        assert bench.hold(5) == fault
        assert bench.cuda.uses == {1: 0}
        bench.memory.release()
        assert bench.cuda.memory_reserved() == 0

    def test_an_oom_in_a_capture_frees_all_with_the_next_release(
        self, bench: Bench
    ) -> None:
        bench.hold(5)
        bench.check(15)
        bench.check(15)
        bench.cuda.limit = 10 * MIB
        fault = bench.replay.capture()
        assert fault is not None and "out of memory" in fault
        bench.replay.drop()
        bench.memory.release()
        assert bench.cuda.memory_reserved() == 0

    def test_a_graph_that_cannot_be_given_back_is_a_failed_capture(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(graph: Graph) -> None:
            raise RuntimeError("no reset")

        bench.replay._most = 1
        bench.hold(5)
        monkeypatch.setattr(Graph, "reset", fail)
        assert bench.hold(6) == "capturing 6 tokens, 1 fields: RuntimeError: no reset"


class TestBounds:
    def test_the_least_recently_used_shape_goes(self) -> None:
        bench = Bench(most=2)
        bench.hold(5)
        bench.hold(6)
        bench.check(5)
        bench.hold(7)
        assert bench.counters["evictions"] == 1
        hits = bench.counters["hits"]
        bench.check(5)
        bench.check(7)
        assert bench.counters["hits"] == hits + 2
        bench.check(6)
        assert bench.counters["hits"] == hits + 2

    def test_an_evicted_shape_starts_over(self) -> None:
        bench = Bench(most=1)
        bench.hold(5)
        bench.hold(6)
        bench.check(5)
        assert not bench.replay.is_due
        bench.check(5)
        assert bench.replay.is_due
        bench.replay.capture()
        bench.check(5)
        assert bench.counters == NO_GRAPHS | {
            "most": 1,
            "held": 1,
            "pool_mib": 5.0,
            "hits": 1,
            "captures": 3,
            "evictions": 2,
        }

    def test_a_shape_over_the_pools_bound_is_too_long_and_so_are_longer_ones(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        bench = Bench(pool_mib=100)
        with caplog.at_level(logging.WARNING):
            assert bench.hold(101) is None
        (message,) = caplog.messages
        assert message == (
            "101 tokens, 1 fields: not replayed: "
            "its graph alone is over INTERN_DECISION_CUDA_GRAPHS_MIB"
        )
        assert bench.cuda.memory_reserved() == 0
        bench.hold(102, 2)
        assert bench.counters == NO_GRAPHS | {"captures": 1, "refusals": 1}
        bench.hold(100)
        bench.check(100)
        assert bench.counters["hits"] == 1

    def test_a_pool_that_grew_over_its_bound_is_given_up_whole_and_begun_anew(
        self,
    ) -> None:
        bench = Bench(pool_mib=100)
        bench.hold(60)
        bench.cuda.pools[bench.cuda.handles] += 45 * MIB  # blocks that do not fit
        bench.hold(61)
        assert bench.counters == NO_GRAPHS | {"captures": 2, "drops": 1}
        assert bench.cuda.memory_reserved() == 0
        bench.check(61)
        bench.replay.capture()
        bench.check(61)
        assert bench.counters["hits"] == 1

    def test_ten_thousand_shapes_stay_within_every_bound(self) -> None:
        bench = Bench(most=8, pool_mib=700)  # one graph has up to 625 MiB
        bench.cuda.reuses_blocks = False
        shapes = list(itertools.product(range(1, 626), range(1, 17)))
        assert len(shapes) == 10_000
        for tokens, fields in shapes:
            arguments = {
                "input_ids": bench.torch.tensor([7] * tokens, 1, tokens),
                "attention_mask": bench.torch.tensor([1] * tokens, 1, tokens),
                "use_cache": False,
                "logits_to_keep": bench.torch.tensor([0] * fields),
            }
            for _ in range(2):
                bench.replay(**arguments)
            bench.replay.capture()
            assert bench.counters["held"] <= 8
            assert sum(bench.cuda.pools.values()) <= 700 * MIB
        counters = bench.counters
        assert (counters["captures"], counters["refusals"]) == (10_000, 0)
        assert (
            counters["evictions"] > 0 and counters["drops"] > 4_000
        )  # both bounds bit
        assert sum(uses > 0 for uses in bench.cuda.uses.values()) <= 1
        assert len(bench.replay._seen) <= MOST_SEEN

    def test_shapes_seen_once_are_remembered_up_to_a_bound(self) -> None:
        bench = Bench()
        for tokens in range(1, 2001):
            for fields in range(1, 6):
                bench.replay._was_seen((tokens, fields))
        assert len(bench.replay._seen) == MOST_SEEN

    def test_the_shape_not_seen_for_longest_is_forgotten_first(self) -> None:
        bench = Bench()
        for tokens in range(1, MOST_SEEN + 1):
            bench.replay._was_seen((tokens, 1))
        assert bench.replay._was_seen((1, 1))
        bench.replay._was_seen((MOST_SEEN + 1, 1))
        expected = {(tokens, 1) for tokens in range(1, MOST_SEEN + 2)} - {(2, 1)}
        assert set(bench.replay._seen) == expected

    def test_captures_take_at_most_their_share_of_the_time(self) -> None:
        bench = Bench()
        record = bench.replay._recorder.record

        def slow(sample: Any, *, is_first: bool) -> Any:
            bench.now += 6.0  # more than the whole credit
            return record(sample, is_first=is_first)

        bench.replay._recorder.record = slow  # type: ignore[method-assign]
        bench.hold(5)
        bench.check(6)
        bench.check(6)
        assert not bench.replay.is_due
        bench.now += 3.9  # a tenth of 6.0 + 3.9 s is not yet the second overdrawn
        assert not bench.replay.is_due
        bench.now += 0.2
        assert bench.replay.is_due
        bench.now += 1e6  # idle time saves up no more than the whole credit
        assert bench.replay.is_due
        bench.replay.capture()
        bench.check(7)
        bench.check(7)
        assert not bench.replay.is_due

    def test_the_readme_tells_every_counter(self, bench: Bench) -> None:
        readme = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
        listed = ", ".join(f'"{name}"' for name in bench.counters)
        assert f"`{{{listed}}}`" in readme
        assert all(f"`{name}`: " in readme for name in bench.counters)

    def test_a_sample_goes_with_the_graphs(self, bench: Bench) -> None:
        bench.check(5)
        bench.check(5)
        assert not bench.replay.drop()
        assert not bench.replay.is_due

    def test_dropped_graphs_are_freed_by_the_next_release(self, bench: Bench) -> None:
        bench.hold(5)
        bench.hold(9)
        bench.memory.release()
        assert bench.cuda.memory_reserved() == 9 * MIB
        assert bench.replay.drop()
        bench.memory.release()
        assert bench.cuda.memory_reserved() == bench.memory.graph_pool == 0
        assert not bench.replay.drop()
        assert bench.counters == NO_GRAPHS | {"captures": 2, "drops": 2}


class TestMemory:
    def test_the_pool_does_not_count_against_the_slack(self, bench: Bench) -> None:
        bench.hold(600)
        assert bench.memory.graph_pool == 600 * MIB
        bench.cuda.cached = 512 * MIB
        bench.cuda.events.clear()
        bench.memory.release_excess()
        assert bench.cuda.events == []
        bench.cuda.cached += 1
        bench.memory.release_excess()
        assert bench.cuda.events == ["empty_cache"]
        assert bench.cuda.memory_reserved() == 600 * MIB

    def test_the_baseline_is_taken_without_the_pool(self, bench: Bench) -> None:
        bench.hold(600)
        bench.memory.set_baseline()
        bench.replay.drop()
        bench.memory.release()
        bench.cuda.cached = 513 * MIB
        bench.memory.release_excess()
        assert bench.cuda.memory_reserved() == 0

    def test_what_lives_outside_the_graphs_pool_is_not_counted(
        self, bench: Bench
    ) -> None:
        bench.cuda.live = 100 * MIB
        bench.hold(5)
        assert bench.memory.graph_pool == 5 * MIB

    def test_a_release_leaves_a_held_graph_usable(self, bench: Bench) -> None:
        bench.hold(5)
        bench.memory.release()
        bench.check(5)
        assert bench.counters["hits"] == 1


class TestForward:
    def test_inside_eager_nothing_is_replayed(self, bench: Bench) -> None:
        bench.hold(5)
        forward = Forward(bench.model)
        forward.replay, forward.is_eager = bench.replay, False
        forward(**bench.arguments(5))
        assert bench.cuda.events[-1] == "replay"
        with pytest.raises(KeyError), forward.eager():
            forward(**bench.arguments(5))
            assert bench.cuda.events[-1] == "eager"
            raise KeyError
        forward(**bench.arguments(5))
        assert bench.cuda.events[-1] == "replay"

    def test_a_call_that_raised_has_not_returned(self, bench: Bench) -> None:
        forward = Forward(bench.model)
        forward(**bench.arguments(5))
        assert forward.returned
        with pytest.raises(TypeError):
            forward(1)
        assert not forward.returned
        assert forward.eager_calls == 1

    def test_on_the_cpu_the_option_is_one_warning(
        self, bench: Bench, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            made = make_replay(
                bench.torch, None, bench.model, bench.memory, most=4, pool_mib=9
            )
        assert made is None
        assert caplog.messages == [
            "INTERN_DECISION_CUDA_GRAPHS is ignored: the device is no GPU"
        ]

    @pytest.mark.parametrize("index", [0, None])
    def test_by_default_there_is_none_and_nothing_is_said(
        self, bench: Bench, index: int | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        made = make_replay(
            bench.torch, index, bench.model, bench.memory, most=0, pool_mib=9
        )
        assert made is None
        assert caplog.messages == []


# The engine around it: warm-up, canary, failures


class StubReplay:
    """Calls the model, counts, and fails where a test says so."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls = 0
        self.held = 1
        self.hits = 0
        self.drops = 0
        self.events: list[str] = []  # the fake allocator's
        self.fault: str | None = None
        self.is_due = True

    def __call__(self, **kwargs: Any) -> Any:
        self.calls += 1
        self.hits += 1
        return self.model(**kwargs)

    def capture(self) -> str | None:
        return self.fault

    def drop(self) -> bool:
        self.drops += 1
        self.events.append("drop")
        had, self.held = self.held, 0
        return bool(had)

    def counters(self) -> dict[str, Any]:
        return {"held": self.held, "hits": self.hits}


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    return Harness(tmp_path, monkeypatch)


@pytest.fixture
def stub(harness: Harness) -> StubReplay:
    stub = StubReplay(None)

    def make(torch: Any, index: Any, model: Any, *_: Any, **bounds: Any) -> StubReplay:
        assert bounds == {"most": 3, "pool_mib": 50}
        stub.model, stub.events = model, torch.cuda.events
        return stub

    harness.monkeypatch.setattr(engine_module, "make_replay", make)
    return stub


@pytest.fixture
def engine(harness: Harness, stub: StubReplay) -> Engine:
    return harness.load(cuda_graphs=3, cuda_graphs_mib=50)


def fail_once(harness: Harness, error: Exception) -> None:
    errors = [error]

    def fail(text: str) -> None:
        if "cold" not in text and errors:
            raise errors.pop()

    harness.control.in_forward = fail


class TestEngine:
    def test_replay_starts_after_the_warm_up_with_three_calls_of_it(
        self, harness: Harness, engine: Engine, stub: StubReplay
    ) -> None:
        assert stub.calls == 3
        assert harness.progress[-1] == "capturing the warm-up"
        engine.score(REQUEST)
        assert stub.calls == 4
        assert engine.graphs == {"held": 1, "hits": 4}
        assert engine.is_capture_due

    def test_what_the_capture_made_belongs_to_the_baseline(
        self, harness: Harness, stub: StubReplay, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        buffers: list[Any] = []

        def capture() -> None:
            buffers.append(harness.torch.allocate(8, "cuda"))

        monkeypatch.setattr(stub, "capture", capture)
        after = harness.load(cuda_graphs=3, cuda_graphs_mib=50).memory()
        assert after["baseline_mib"] == after["allocated_mib"]

    def test_the_canary_asks_the_model_itself(
        self, engine: Engine, stub: StubReplay
    ) -> None:
        engine.canary()
        assert stub.calls == 3

    def test_replay_stays_off_when_the_warm_up_replays_otherwise(
        self, harness: Harness, stub: StubReplay, caplog: pytest.LogCaptureFixture
    ) -> None:
        harness.plant = lambda control: control.drift.extend([0] * 6 + [1, 0])
        with caplog.at_level(logging.WARNING):
            engine = harness.load(cuda_graphs=3, cuda_graphs_mib=50)
        assert any("replay is off: answers.q" in line for line in caplog.messages)
        calls = stub.calls
        engine.score(REQUEST)
        assert stub.calls == calls
        assert stub.drops == 1
        assert engine.graphs is None
        assert not engine.is_capture_due

    def test_replay_stays_off_when_the_warm_up_cannot_be_captured(
        self, harness: Harness, stub: StubReplay, caplog: pytest.LogCaptureFixture
    ) -> None:
        stub.hits = -3
        with caplog.at_level(logging.WARNING):
            engine = harness.load(cuda_graphs=3, cuda_graphs_mib=50)
        assert "replay is off: the warm-up is not captured" in caplog.messages
        assert engine.graphs is None
        engine.score(REQUEST)
        assert stub.calls == 3

    def test_a_capture_that_fails_at_startup_leaves_replay_off_with_one_warning(
        self, harness: Harness, stub: StubReplay, caplog: pytest.LogCaptureFixture
    ) -> None:
        stub.fault, stub.hits = "it broke", -3
        with caplog.at_level(logging.WARNING):
            engine = harness.load(cuda_graphs=3, cuda_graphs_mib=50)
        assert caplog.messages == ["replay is off: it broke"]
        assert engine.graphs is None
        assert stub.drops == 1

    @pytest.mark.parametrize("fault", [None, "it broke"])
    def test_startup_is_refused_when_the_model_itself_drifts_after_the_capture(
        self, harness: Harness, stub: StubReplay, fault: str | None
    ) -> None:
        stub.fault = fault
        before = 6 if fault else 7  # a failed capture has a canary of its own
        harness.plant = lambda control: control.drift.extend([0] * before + [1])
        with pytest.raises(StartupRefused):
            harness.load(cuda_graphs=3, cuda_graphs_mib=50)

    def test_an_oom_drops_all_graphs_and_the_call_is_made_once_more_without(
        self, harness: Harness, engine: Engine, stub: StubReplay
    ) -> None:
        expected = engine.score(REQUEST)[0]["answers"]
        harness.torch.cuda.events.clear()
        fail_once(harness, OutOfMemoryError("CUDA out of memory"))
        assert engine.score(REQUEST)[0]["answers"] == expected
        assert harness.torch.cuda.events == ["drop", "empty_cache"]

    def test_the_second_try_after_an_oom_uses_what_was_prepared(
        self, harness: Harness, engine: Engine
    ) -> None:
        request = {**REQUEST, "state": "evidence " * 2000}
        prepared = engine.prepare(request)
        assert prepared is not None
        encodes = harness.count_encodes(engine)
        fail_once(harness, OutOfMemoryError("CUDA out of memory"))
        engine.score(request, prepared)
        assert encodes == []

    def test_an_oom_without_graphs_is_a_503_at_once(
        self, harness: Harness, engine: Engine, stub: StubReplay
    ) -> None:
        stub.held = 0
        calls = stub.calls
        fail_once(harness, OutOfMemoryError("CUDA out of memory"))
        with pytest.raises(OutOfMemory):
            engine.score(REQUEST)
        assert stub.calls == calls + 1

    def test_an_oom_that_stays_is_a_503_after_the_graphs_went(
        self, harness: Harness, engine: Engine, stub: StubReplay
    ) -> None:
        def fail(text: str) -> None:
            raise OutOfMemoryError("CUDA out of memory")

        harness.control.in_forward = fail
        calls = stub.calls
        with pytest.raises(OutOfMemory) as failure:
            engine.score(REQUEST)
        assert failure.value.__context__ is None
        assert stub.calls == calls + 2

    @pytest.mark.parametrize(
        ("error", "expected", "drops"),
        [
            (ValueError("too long"), InvalidRequest, 0),
            (KeyError("q"), ScoringFailed, 1),
        ],
    )
    def test_graphs_survive_a_refused_request_but_no_failure_of_the_model(
        self,
        harness: Harness,
        engine: Engine,
        stub: StubReplay,
        error: Exception,
        expected: type[Exception],
        drops: int,
    ) -> None:
        fail_once(harness, error)
        with pytest.raises(expected):
            engine.score(REQUEST)
        assert stub.drops == drops

    def test_a_value_error_of_replays_own_code_is_not_the_requests_fault(
        self, engine: Engine, stub: StubReplay, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(self: StubReplay, **kwargs: Any) -> Any:
            raise ValueError("copy_: shapes differ")

        monkeypatch.setattr(StubReplay, "__call__", fail)
        with pytest.raises(ScoringFailed):
            engine.score(REQUEST)
        assert stub.drops == 1

    def test_a_failed_capture_ends_replay_and_the_warm_up_is_scored(
        self,
        harness: Harness,
        engine: Engine,
        stub: StubReplay,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        stub.fault = "a capture failed"
        expected = engine.score(REQUEST)[0]["answers"]
        calls, replayed = harness.control.calls, stub.calls
        harness.torch.cuda.events.clear()
        with caplog.at_level(logging.WARNING):
            engine.after_answer()
        assert caplog.messages == ["replay is off: a capture failed"]
        assert harness.torch.cuda.events == ["drop", "empty_cache"]
        assert harness.control.calls == calls + 1
        assert engine.graphs is None
        assert engine.score(REQUEST)[0]["answers"] == expected
        assert (stub.calls, engine.is_capture_due) == (replayed, False)
        engine.after_answer()
        assert len(caplog.messages) == 1

    def test_a_failed_capture_after_which_the_warm_up_differs_loses_the_engine(
        self, harness: Harness, engine: Engine, stub: StubReplay
    ) -> None:
        stub.fault = "a capture failed"
        harness.control.drift = [1]
        with pytest.raises(EngineFailed):
            engine.after_answer()
        with pytest.raises(EngineFailed):
            engine.score(REQUEST)
        engine.after_answer()  # nothing is captured on a lost engine

    def test_graphs_that_cannot_be_given_up_lose_the_engine(
        self, engine: Engine, stub: StubReplay, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail() -> bool:
            raise RuntimeError("no reset")

        stub.fault = "a capture failed"
        monkeypatch.setattr(stub, "drop", fail)
        with pytest.raises(EngineFailed):
            engine.after_answer()

    def test_off_by_default(self, harness: Harness) -> None:
        engine = harness.load()
        assert engine.graphs is None
        assert not engine.is_capture_due
        engine.after_answer()

    def test_on_the_cpu_it_is_off_with_one_warning(
        self, harness: Harness, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            engine = harness.load(device="cpu", cuda_graphs=4)
        assert engine.graphs is None
        assert [line for line in caplog.messages if "CUDA_GRAPHS" in line] == [
            "INTERN_DECISION_CUDA_GRAPHS is ignored: the device is no GPU"
        ]


# The worker: after the answer, on the same thread


class CountedTurns(Turns):
    """Turns that tell how many calls are inside."""

    inside = 0

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        with super().call():
            self.inside += 1
            yield
            self.inside -= 1


class DueEngine:
    """An engine that has something to capture after every answer."""

    def __init__(self) -> None:
        self.is_capture_due = True
        self.answered = threading.Event()
        self.threads: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.failure: Exception | None = None
        self.captures = 0
        self.turns = CountedTurns()
        self.calls_inside: list[int] = []

    def score(self, request: Any, prepared: Any = None) -> tuple[dict[str, Any], str]:
        return {}, ""

    def memory(self) -> dict[str, Any]:
        return {"captures": self.captures}

    def after_answer(self) -> None:
        assert self.answered.wait(10)  # the client has its answer by now
        self.captures += 1
        self.calls_inside.append(self.turns.inside)
        self.threads.put(threading.current_thread().name)
        if self.failure is not None:
            raise self.failure


class TestWorker:
    def test_the_capture_comes_after_the_reply_on_the_inference_thread(self) -> None:
        engine = DueEngine()
        worker = Worker(lambda: engine, turns=engine.turns)
        worker.start()
        job = Job(({},), lambda: False)
        worker.submit(job)
        job.wait()
        engine.answered.set()
        assert engine.threads.get(timeout=10) == "inference"
        worker.stop()
        assert worker.join(10)
        assert not worker.is_lost and worker.running_since is None
        assert engine.calls_inside == [1]  # paced as a call is
        assert worker.memory == {"captures": 1}

    @pytest.mark.parametrize(
        ("failure", "is_lost"), [(EngineFailed("gone"), True), (KeyError("x"), False)]
    )
    def test_an_engine_lost_in_a_capture_is_told_at_once(
        self, failure: Exception, is_lost: bool
    ) -> None:
        engine = DueEngine()
        engine.failure = failure
        lost = threading.Event()
        worker = Worker(lambda: engine, on_lost=lost.set)
        worker.start()
        job = Job(({},), lambda: False)
        worker.submit(job)
        job.wait()
        engine.answered.set()
        engine.threads.get(timeout=10)
        worker.stop()
        assert worker.join(10)
        assert (worker.is_lost, lost.is_set()) == (is_lost, is_lost)


# The real model on the CPU: a "graph" that runs the captured work anew


class RerunRecorder(Recorder):
    """Runs the very work that a capture would record, each time it is replayed."""

    def _capture(self, buffers: Any, shape: Any) -> Any:
        def replay() -> None:
            with self._torch.inference_mode():
                buffers.forward(self._model, shape)

        return types.SimpleNamespace(replay=replay, reset=lambda: None)


@pytest.mark.torch
def test_the_work_that_is_captured_gives_the_real_models_own_answers(
    demo_checkpoint: DemoCheckpoint,
) -> None:
    torch = pytest.importorskip("torch")
    source = read_inference(demo_checkpoint.path, demo_checkpoint.pins)
    inference = execute_inference(source, demo_checkpoint.pins)
    decision_engine = inference.DecisionEngine(demo_checkpoint.path, device="cpu")
    parts = ("all", "equal", "inference_mode", "int64", "uint8", "zeros")
    stand_in = types.SimpleNamespace(cuda=GraphTorch().cuda)
    for name in parts:
        setattr(stand_in, name, getattr(torch, name))
    model = decision_engine.backend.model
    memory = Memory(stand_in, 0, slack_mib=512)
    replay = Replay(stand_in, 0, model, memory, most=4, pool_mib=1)
    replay._recorder = RerunRecorder(stand_in, 0, model, LONGEST_TOKENS)
    requests = [
        {
            "state": f"{left} parcels of {right} are late",
            "questions": {
                f"q{place}": {"type": "noul", "instructions": "Refund?"}
                for place in range(fields)
            },
        }
        for fields in (1, 3)
        for left, right in itertools.permutations(range(2, 5), 2)
    ]
    expected = [decision_engine.predict(request)["answers"] for request in requests]
    decision_engine.backend.model = replay
    for _ in range(3):
        for request, answers in zip(requests, expected, strict=True):
            assert decision_engine.predict(request)["answers"] == answers
            replay.capture()
    counters = replay.counters()
    assert (counters["refusals"], counters["held"]) == (0, 2)
    assert counters["hits"] == 3 * len(requests) - 2 * counters["held"]
