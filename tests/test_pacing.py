"""Who may run Python beside a call, and when: told by a clock that the test owns."""

from __future__ import annotations

import threading

import pytest
from fakes import WAIT
from wire import until

from intern_decision_serve import pacing
from intern_decision_serve.pacing import HEAVY_BYTES, Pace, Turns


class Time:
    """A clock and a sleep that only moves it."""

    def __init__(self) -> None:
        self.now = 50.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if round(seconds, 6):
            self.slept.append(round(seconds, 6))
        self.now += seconds


def make_pace(time: Time, *, rate: float, burst: int, scoring: bool = True) -> Pace:
    return Pace(rate, burst, is_scoring=lambda: scoring, clock=time, sleep=time.sleep)


# --- Pace ---------------------------------------------------------------------------


def test_nobody_waits_on_an_idle_engine() -> None:
    time = Time()
    pace = make_pace(time, rate=1, burst=1, scoring=False)
    for _ in range(1000):
        pace.wait()
    assert time.slept == []


def test_beyond_the_burst_turns_come_at_the_rate() -> None:
    time = Time()
    pace = make_pace(time, rate=100, burst=4)
    for _ in range(9):
        pace.wait()
    assert time.slept == [0.01] * 5


def test_the_burst_grows_back_and_no_further() -> None:
    time = Time()
    pace = make_pace(time, rate=100, burst=4)
    for _ in range(4):
        pace.wait()
    time.now += 3600
    for _ in range(5):
        pace.wait()
    assert time.slept == [0.01]


def test_waiters_at_one_instant_are_spread_over_the_rate() -> None:
    """Many threads at once: each gets a turn of its own, none twice the same."""
    time = Time()
    slept: list[float] = []
    pace = Pace(10, 1, is_scoring=lambda: True, clock=time, sleep=slept.append)
    for _ in range(5):
        pace.wait()
    assert [round(seconds, 6) for seconds in slept] == [0.1, 0.2, 0.3, 0.4]


# --- Turns --------------------------------------------------------------------------


class Waiting:
    """A thread that takes a heavy turn, and then waits to be let go."""

    def __init__(self, turns: Turns) -> None:
        self.inside = threading.Event()
        self.go = threading.Event()
        self._turns = turns
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        with self._turns.heavy():
            self.inside.set()
            assert self.go.wait(WAIT)

    def end(self) -> None:
        self.go.set()
        self.thread.join(WAIT)
        assert not self.thread.is_alive()


@pytest.mark.parametrize(
    ("size", "heavy"), [(0, False), (HEAVY_BYTES, False), (HEAVY_BYTES + 1, True)]
)
def test_the_size_decides_which_turn_it_is(size: int, heavy: bool) -> None:
    turns = Turns()
    with turns.prepare(size):
        assert turns._heavy is heavy


def test_light_work_runs_beside_a_call_but_one_thread_at_a_time() -> None:
    turns = Turns()
    with turns.call(), turns.light():
        assert not turns._light.acquire(blocking=False)
    assert turns._light.acquire(blocking=False)


def test_heavy_work_waits_for_the_end_of_the_call() -> None:
    turns = Turns()
    with turns.call():
        waiting = Waiting(turns)
        until(lambda: turns._waiting == 1)
        assert not waiting.inside.is_set()
    assert waiting.inside.wait(WAIT)
    waiting.end()


def test_a_call_waits_for_heavy_work_to_end_and_for_no_second_piece() -> None:
    turns = Turns()
    first = Waiting(turns)
    assert first.inside.wait(WAIT)
    second = Waiting(turns)
    until(lambda: turns._waiting == 1)
    calling = threading.Event()

    def call() -> None:
        with turns.call():
            calling.set()

    caller = threading.Thread(target=call)
    caller.start()
    assert not calling.is_set()
    first.end()
    second.end()
    assert calling.wait(WAIT)
    caller.join()


def test_a_waiting_piece_goes_before_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Back-to-back calls leave no gap: without this, heavy work would starve."""
    monkeypatch.setattr(pacing, "LONGEST_YIELD_SECONDS", WAIT)
    turns = Turns()
    order: list[str] = []

    def work() -> None:
        with turns.heavy():
            order.append("heavy")

    with turns.call():
        worker = threading.Thread(target=work)
        worker.start()
        until(lambda: turns._waiting == 1)
    with turns.call():
        order.append("call")
    worker.join(WAIT)
    assert order == ["heavy", "call"]


def test_heavy_work_spends_credit_and_calls_earn_a_tenth() -> None:
    time = Time()
    turns = Turns(time)
    assert turns._affordable()
    with turns.heavy():
        time.now += 0.5
    assert not turns._affordable()
    assert turns._credit == pytest.approx(-0.4)
    with turns.call():
        time.now += 1.0
    assert turns._credit == pytest.approx(-0.3)
    time.now += 0.25  # nothing runs: all of it
    assert not turns._affordable()
    time.now += 0.1
    assert turns._affordable()
    time.now += 1000
    turns._accrue()
    assert turns._credit == pacing.MOST_CREDIT_SECONDS


def test_a_call_does_not_wait_for_work_that_has_no_credit() -> None:
    time = Time()
    turns = Turns(time)
    with turns.heavy():
        time.now += 60
    waiting = Waiting(turns)
    until(lambda: turns._waiting == 1)
    with turns.call():
        assert not waiting.inside.is_set()
    time.now += 60
    assert waiting.inside.wait(WAIT)
    waiting.end()


def test_a_failure_inside_a_turn_gives_it_back() -> None:
    turns = Turns()
    for turn in (turns.light, turns.heavy, turns.call):
        with pytest.raises(KeyError), turn():
            raise KeyError
        with turns.heavy(), pytest.raises(KeyError):
            raise KeyError
    with turns.call():
        pass
    assert (turns._heavy, turns._calling, turns._waiting) == (False, False, 0)
