"""At most MAX_QUEUE at once; the next is told how long, and waits for nothing."""

from __future__ import annotations

import threading

import pytest

from intern_decision_serve.admission import Admission
from intern_decision_serve.errors import Busy


def test_the_next_one_is_busy_with_the_estimate_for_all_slots() -> None:
    asked: list[int] = []

    def estimate(admitted: int) -> int:
        asked.append(admitted)
        return 7

    admission = Admission(2, estimate)
    admission.enter()
    admission.enter()
    assert asked == []
    with pytest.raises(Busy) as caught:
        admission.enter()
    assert (caught.value.status, caught.value.code) == (429, "busy")
    assert caught.value.message == "2 requests are in progress"
    assert (caught.value.retry_after, asked) == (7, [2])
    assert admission.admitted == 2


def test_a_slot_given_back_is_free_at_once() -> None:
    admission = Admission(1, lambda admitted: 1)
    for _ in range(3):
        admission.enter()
        assert admission.admitted == 1
        admission.leave()
        assert admission.admitted == 0


def test_a_slot_cannot_be_given_back_twice() -> None:
    admission = Admission(1, lambda admitted: 1)
    with pytest.raises(ValueError):
        admission.leave()


def test_waiting_until_empty_ends_with_the_last_one_or_its_timeout() -> None:
    admission = Admission(2, lambda admitted: 1)
    assert admission.wait_until_empty(0)
    admission.enter()
    assert not admission.wait_until_empty(0.01)
    leaver = threading.Timer(0.01, admission.leave)
    leaver.start()
    assert admission.wait_until_empty(20)
    leaver.join()


def test_many_threads_never_hold_more_than_the_slots() -> None:
    admission = Admission(3, lambda admitted: 1)
    held, most, refused = 0, 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal held, most, refused
        for _ in range(300):
            try:
                admission.enter()
            except Busy:
                with lock:
                    refused += 1
                continue
            with lock:
                held += 1
                most = max(most, held)
            with lock:
                held -= 1
            admission.leave()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= most <= 3
    assert admission.admitted == 0
