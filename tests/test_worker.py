"""The one inference thread: every job ends, in order, and leaves nothing behind."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes import PROMPT_SHA256, WAIT, FakeEngine, fake_predict
from wire import until

from intern_decision_serve import jobs as jobs_module
from intern_decision_serve import worker as worker_module
from intern_decision_serve.errors import (
    EngineFailed,
    InvalidRequest,
    OutOfMemory,
    ScoringFailed,
    ServiceError,
    ShuttingDown,
)
from intern_decision_serve.jobs import ClientGone, Job, Result
from intern_decision_serve.worker import Worker


def request(name: str = "q") -> dict[str, Any]:
    return {"state": name, "questions": {name: {"type": "noul"}}}


def never() -> bool:
    return False


def job(*names: str, is_gone: Callable[[], bool] = never, prepared: Any = ()) -> Job:
    return Job(tuple(request(name) for name in names), is_gone, prepared)


class Running:
    """A worker that is ready, and how often it said that the engine is lost."""

    def __init__(self) -> None:
        self.lost = threading.Semaphore(0)
        self.worker = Worker(FakeEngine, on_lost=self.lost.release)
        self.worker.start()
        assert self.worker.ready.wait(WAIT)
        self.engine: FakeEngine = self.worker.engine

    def submit(self, *names: str, **options: Any) -> Job:
        submitted = job(*names, **options)
        self.worker.submit(submitted)
        return submitted

    def hold(self) -> Job:
        """Keep the inference thread inside a call until the gate opens."""
        self.engine.gate.clear()
        held = self.submit("held")
        self.engine.wait_for_call()
        return held


@pytest.fixture
def running() -> Iterator[Running]:
    started = Running()
    yield started
    started.engine.gate.set()
    started.worker.stop()
    assert started.worker.join(WAIT)


def outcome(waiting: Job) -> Result | BaseException:
    try:
        return waiting.wait()
    except BaseException as failure:
        return failure


# --- results ------------------------------------------------------------------------


def test_a_job_gets_its_calls_scored_in_order(running: Running) -> None:
    result = running.submit("a", "b", "c").wait()
    assert result.scored == tuple(
        (fake_predict(request(name)), PROMPT_SHA256) for name in "abc"
    )
    assert result.queued_seconds >= 0 and result.scoring_seconds >= 0
    assert running.engine.requests == [request(name) for name in "abc"]
    assert running.worker.calls == 3
    assert running.worker.memory == running.engine.memory()
    assert running.worker.last_success_at is not None


def test_what_a_job_waited_is_queued_and_not_scored(running: Running) -> None:
    job = Job((request("a"),), lambda: False, submitted_at=time.monotonic() - 1e6)
    running.worker.submit(job)
    result = job.wait()
    assert result.queued_seconds >= 1e6 > result.scoring_seconds


def test_jobs_are_scored_first_come_first_served_and_never_interleaved(
    running: Running,
) -> None:
    held = running.hold()
    jobs = [running.submit(f"{n}a", f"{n}b") for n in range(5)]
    running.engine.gate.set()
    for each in [held, *jobs]:
        each.wait()
    order = [scored["state"] for scored in running.engine.requests]
    assert order == ["held", *(f"{n}{part}" for n in range(5) for part in "ab")]
    assert running.engine.most_inside == 1


def test_every_call_is_on_the_thread_that_loaded_the_engine(running: Running) -> None:
    for each in [running.submit("a", "b"), running.submit("c")]:
        each.wait()
    threads = {thread for thread, _ in running.engine.records}
    assert threads == {running.engine.loaded_on}
    assert threading.get_ident() not in threads


def test_what_was_prepared_goes_into_its_call(running: Running) -> None:
    seen: list[Any] = []

    def score(request: Any, prepared: Any = None) -> tuple[dict[str, Any], str]:
        seen.append(prepared)
        return fake_predict(request), PROMPT_SHA256

    running.engine.score = score  # type: ignore[method-assign]
    running.submit("a", "b", prepared=(lambda: "first", lambda: None)).wait()
    assert seen == ["first", None]


# --- failures -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "failure",
    [InvalidRequest("too long"), OutOfMemory("no memory"), ScoringFailed("broken")],
)
def test_an_exception_comes_back_as_itself_and_nothing_else_fails(
    running: Running, failure: ServiceError
) -> None:
    running.engine.script.extend([None, failure])
    failed = running.submit("a", "b", "c")
    assert outcome(failed) is failure
    assert running.engine.requests == [request("a"), request("b")]
    assert running.submit("d").wait()


@pytest.mark.parametrize(
    "failure", [RuntimeError("secret"), KeyError("x"), MemoryError(), SystemExit(3)]
)
def test_an_unforeseen_failure_is_scoring_failed_with_a_fixed_message(
    running: Running, failure: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    running.engine.script.append(failure)
    got = outcome(running.submit("a"))
    assert isinstance(got, ScoringFailed)
    assert got.message == "scoring failed"
    assert "Traceback" in caplog.text
    assert running.submit("b").wait()


def test_a_failure_while_preparing_is_the_jobs_own(running: Running) -> None:
    refusal = InvalidRequest("too long")

    def refuse() -> Any:
        raise refusal

    assert outcome(running.submit("a", prepared=(refuse,))) is refusal
    assert running.engine.requests == []


def test_a_failure_holds_no_frame_of_the_inference_thread(running: Running) -> None:
    """A traceback would keep the failed call's tensors and the request alive."""
    running.engine.script.append(OutOfMemory("no memory"))
    got = outcome(running.submit("a"))
    assert isinstance(got, OutOfMemory)
    frames, traceback = [], got.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert frames == ["outcome", "wait"]


def test_a_failed_request_leaves_nothing_for_the_collector(running: Running) -> None:
    gc.collect()
    gc.disable()
    try:
        marker = _Marker()
        watch = weakref.ref(marker)
        running.engine.script.append(OutOfMemory("no memory"))
        failed = Job(({"state": marker, "questions": {}},), never)
        running.worker.submit(failed)
        del marker
        running.engine.records = _Forgetting()
        with pytest.raises(OutOfMemory):
            failed.wait()
        del failed
        running.submit("next").wait()
        until(lambda: watch() is None)
    finally:
        gc.enable()


def test_a_requests_data_does_not_outlive_its_answer(running: Running) -> None:
    """It may be a MiB, and the next request may be hours away."""
    marker = _Marker()
    watch = weakref.ref(marker)
    running.engine.records = _Forgetting()
    running.engine.predict = lambda _: {}
    scored = Job(({"state": marker, "questions": {}},), never)
    running.worker.submit(scored)
    scored.wait()
    del marker, scored
    until(lambda: watch() is None)


class _Marker:
    """Stands for a request's data."""


class _Forgetting(list[tuple[int, dict[str, Any]]]):
    def append(self, item: object) -> None:
        pass


# --- a lost engine ------------------------------------------------------------------


def test_a_lost_engine_answers_all_that_wait_and_refuses_what_comes(
    running: Running,
) -> None:
    running.engine.script.append(EngineFailed("the engine is lost"))
    jobs = [running.hold(), *(running.submit("a", "b") for _ in range(3))]
    running.engine.gate.set()
    for each in jobs:
        got = outcome(each)
        assert isinstance(got, EngineFailed)
        assert (got.status, got.code) == (503, "engine_failed")
        assert got.retry_after == worker_module.RESTART_SECONDS
    assert running.engine.requests == [request("held")]
    with pytest.raises(EngineFailed) as caught:
        running.submit("late")
    assert caught.value.retry_after == worker_module.RESTART_SECONDS
    assert running.worker.is_lost
    assert running.lost.acquire(timeout=WAIT)
    assert not running.lost.acquire(blocking=False)  # told once


# --- what the engine does after an answer -------------------------------------------


class Capturing(FakeEngine):
    """An engine that has something to capture, once, after its first answer."""

    def __init__(self) -> None:
        super().__init__()
        self.failure: Exception | None = None
        self.captured_on: list[int] = []

    @property
    def is_capture_due(self) -> bool:
        return not self.captured_on

    def after_answer(self) -> None:
        self.captured_on.append(threading.get_ident())
        if self.failure is not None:
            raise self.failure


@pytest.mark.parametrize(
    ("failure", "is_lost"),
    [(None, False), (RuntimeError("x"), False), (EngineFailed("lost"), True)],
)
def test_a_capture_runs_once_on_the_inference_thread_and_may_fail(
    running: Running, failure: Exception | None, is_lost: bool
) -> None:
    capturing = Capturing()
    capturing.failure, capturing.loaded_on = failure, running.engine.loaded_on
    running.worker.engine = capturing
    running.submit("a").wait()
    until(lambda: capturing.captured_on == [capturing.loaded_on])
    until(lambda: running.worker.running_since is None)
    if is_lost:
        with pytest.raises(EngineFailed):
            running.submit("b")
    else:
        assert running.submit("b").wait()
    assert running.worker.is_lost is is_lost
    assert running.lost.acquire(blocking=False) is is_lost


def test_nothing_is_captured_on_a_lost_engine(running: Running) -> None:
    capturing = Capturing()
    capturing.script.append(EngineFailed("lost"))
    capturing.gate.clear()
    running.worker.engine = capturing
    jobs = [running.submit("a"), running.submit("b")]
    capturing.gate.set()
    for each in reversed(jobs):  # the gap between the two is over with the second
        with pytest.raises(EngineFailed):
            each.wait()
    assert capturing.captured_on == []


def test_nothing_is_captured_while_stopping(running: Running) -> None:
    capturing = Capturing()
    capturing.loaded_on = running.engine.loaded_on
    capturing.gate.clear()
    running.worker.engine = capturing
    job = running.submit("a")
    capturing.wait_for_call()
    running.worker.stop()
    capturing.gate.set()
    assert job.wait()
    assert running.worker.join(WAIT)
    assert capturing.captured_on == []


# --- stopping -----------------------------------------------------------------------


def test_stopping_scores_what_is_queued_and_refuses_what_comes(
    running: Running,
) -> None:
    jobs = [running.hold(), running.submit("a"), running.submit("b")]
    running.worker.stop()
    running.worker.stop()
    with pytest.raises(ShuttingDown) as caught:
        running.submit("late")
    assert (caught.value.code, caught.value.retry_after) == ("shutting_down", 60)
    running.engine.gate.set()
    for each in jobs:
        assert each.wait()
    assert running.worker.join(WAIT)


@pytest.mark.parametrize("attempt", range(30))
def test_no_job_is_lost_between_submit_and_stop(attempt: int) -> None:
    """However they race, a job is refused or answered, never left waiting."""
    started = Running()
    barrier = threading.Barrier(5)
    ends: list[object] = []

    def client() -> None:
        barrier.wait()
        for number in range(20):
            try:
                ends.append(started.submit(str(number)).wait())
            except ShuttingDown as refusal:
                ends.append(refusal)

    threads = [threading.Thread(target=client) for _ in range(4)]
    for thread in threads:
        thread.start()
    barrier.wait()
    started.worker.stop()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    assert len(ends) == 80
    assert started.worker.join(WAIT)


# --- clients that are gone ----------------------------------------------------------


def test_a_gone_client_is_skipped_before_scoring(running: Running) -> None:
    held = running.hold()
    gone = threading.Event()
    skipped = running.submit("gone", is_gone=gone.is_set)
    live = running.submit("live")
    gone.set()
    running.engine.gate.set()
    assert isinstance(outcome(skipped), ClientGone)
    held.wait()
    live.wait()
    states = [scored["state"] for scored in running.engine.requests]
    assert states == ["held", "live"]
    assert running.worker.skipped == 1


def test_a_gone_client_is_let_go_while_the_call_before_still_runs(
    running: Running,
) -> None:
    running.hold()
    waiting = running.submit("a" * 1000, is_gone=lambda: True)
    assert isinstance(outcome(waiting), ClientGone)  # the gate is still shut
    assert waiting.requests == ()
    assert waiting.prepared == ()


def test_a_gone_client_is_noticed_between_two_of_its_calls(running: Running) -> None:
    gone = threading.Event()

    def predict(request: dict[str, Any]) -> dict[str, Any]:
        gone.set()
        return fake_predict(request)

    running.engine.predict = predict
    assert isinstance(
        outcome(running.submit("a", "b", "c", is_gone=gone.is_set)), ClientGone
    )
    assert running.engine.requests == [request("a")]
    assert running.worker.skipped == 1


def test_one_thread_decides_a_jobs_fate() -> None:
    contested = job("a")
    claims: list[bool] = []
    threads = [
        threading.Thread(target=lambda: claims.append(contested.claim()))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claims) == [False] * 7 + [True]


def test_a_gone_client_whose_call_runs_gets_the_result_all_the_same(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was claimed: a running call cannot be taken back, and keeps its slot."""
    monkeypatch.setattr(jobs_module, "GONE_CHECK_SECONDS", 0.001)
    gone = threading.Event()
    running.engine.gate.clear()
    waiting = running.submit("a", is_gone=gone.is_set)
    running.engine.wait_for_call()
    gone.set()
    threading.Timer(0.02, running.engine.gate.set).start()
    assert waiting.wait().scored


# --- what others read ---------------------------------------------------------------


def test_the_running_call_shows_its_age(running: Running) -> None:
    assert (running.worker.is_scoring, running.worker.running_seconds) == (False, None)
    held = running.hold()
    assert running.worker.is_scoring
    seconds = running.worker.running_seconds
    assert seconds is not None and seconds >= 0
    running.engine.gate.set()
    held.wait()
    until(lambda: not running.worker.is_scoring)
    assert running.worker.median_call_seconds is not None


@pytest.mark.parametrize(
    ("call_seconds", "pending", "admitted", "expected"),
    [
        ([], 0, 32, 1),  # nothing measured, nothing running: the least
        ([0.001], 1, 1, 1),
        ([0.15], 0, 32, 5),  # admitted, not submitted yet: 4.8 s
        ([0.15], 64, 32, 10),  # more calls than requests: 9.6 s
        ([0.1, 0.2, 9.0], 10, 5, 2),  # the median, not the mean
        ([10.0], 32, 32, 30),  # no more than a client's patience
    ],
)
def test_the_estimated_wait_is_whole_seconds_near_the_real_one(
    call_seconds: list[float], pending: int, admitted: int, expected: int
) -> None:
    worker = Worker(FakeEngine)
    worker._call_seconds.extend(call_seconds)
    worker._pending_calls = pending
    assert worker.estimate_wait(admitted) == expected


def test_before_any_call_ended_the_running_one_is_the_measure() -> None:
    worker = Worker(FakeEngine)
    worker.running_since = -1e6
    assert worker.estimate_wait(2) == worker_module.LONGEST_RETRY_SECONDS


def test_pending_calls_come_back_to_none(running: Running) -> None:
    running.engine.script.extend([None, None, OutOfMemory("no memory")])
    held = running.hold()
    jobs = [
        running.submit("a", "b"),
        running.submit("c", "d", is_gone=lambda: True),
        running.submit("e", is_gone=lambda: True),
    ]
    assert running.worker._pending_calls == 6
    assert isinstance(outcome(jobs[2]), ClientGone)
    assert running.worker._pending_calls == 5  # it costs nothing any more
    running.engine.gate.set()
    for each in [held, *jobs[:2]]:
        outcome(each)
    until(lambda: running.worker._pending_calls == 0)


def test_a_load_that_fails_is_told_and_nothing_is_scored() -> None:
    failure = RuntimeError("no weights")
    ready: list[bool] = []

    def load() -> FakeEngine:
        raise failure

    worker = Worker(load)
    worker.start(lambda: ready.append(worker.ready.is_set()))
    assert worker.ready.wait(WAIT)
    assert worker.join(WAIT)
    assert worker.failure is failure
    assert ready == [True]


@pytest.mark.parametrize("failure", [None, OutOfMemory("no memory")])
def test_the_memory_figures_are_read_after_every_call_failed_ones_too(
    running: Running, failure: ServiceError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"reserved_mib": 99}
    monkeypatch.setattr(running.engine, "memory", lambda: figures)
    running.engine.script.append(failure)
    submitted = running.submit("q")
    if failure is None:
        submitted.wait()
    else:
        with pytest.raises(OutOfMemory):
            submitted.wait()
    assert running.worker.memory is figures


def test_figures_that_cannot_be_read_cost_no_answer(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Any:
        raise RuntimeError("counters")

    monkeypatch.setattr(running.engine, "memory", fail)
    assert running.submit("q").wait().scored
    assert "counters cannot be read" in caplog.text
