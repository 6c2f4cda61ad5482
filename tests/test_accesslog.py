"""One line a request, a flood in one line a second, nothing of a client's text."""

from __future__ import annotations

import logging

import pytest

from intern_decision_serve.accesslog import (
    REFUSAL_LINES_A_SECOND,
    AccessLog,
    Record,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock, caplog: pytest.LogCaptureFixture) -> AccessLog:
    caplog.set_level(logging.INFO, "intern_decision_serve.access")
    return AccessLog(clock)


def test_a_line_holds_every_field_in_key_value_form(
    log: AccessLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.write(
        Record(
            request_id="r-1",
            method="POST",
            path="/decide",
            status=200,
            code="ok",
            total_seconds=0.01234,
            queued_seconds=0.002,
            scoring_seconds=0.01,
            calls=2,
            input_tokens=431,
            sent_bytes=1234,
        )
    )
    (line,) = caplog.messages
    assert line == (
        "id=r-1 method=POST path=/decide status=200 ms=12.3 queued_ms=2.0 "
        "scoring_ms=10.0 calls=2 input_tokens=431 bytes=1234"
    )


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/decide", "/decide"),
        ("/a b\n=c?d&e", "/a%20b%0A%3Dc%3Fd%26e"),
        ("/caf\xe9\u2028", "/caf%C3%A9%E2%80%A8"),
        ("/\x1b[31m", "/%1B%5B31m"),
        ("/%0astatus%3d200", "/%0astatus%3d200"),
        ("/" + "x" * 8000, "/" + "x" * 63),
    ],
)
def test_a_path_cannot_forge_a_field_or_a_line(path: str, shown: str) -> None:
    line = Record(path=path).line()
    assert f" path={shown} status=" in line
    assert line.isprintable()
    assert len(line.split(" ")) == 10


def test_a_long_method_is_cut() -> None:
    assert " path" in Record(method="M" * 8000).line()[:40]


def test_a_flood_of_refusals_is_summed_up_once_a_second(
    log: AccessLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(500):
        log.write(Record(status=401, code="unauthorized"))
    for _ in range(20):
        log.write(Record(status=429, code="busy"))
    log.write(Record(status=503, code="shutting_down"))
    assert len(caplog.messages) == REFUSAL_LINES_A_SECOND
    clock.now += 1
    log.write(Record(status=401, code="unauthorized"))
    assert caplog.messages[REFUSAL_LINES_A_SECOND] == (
        "summed_up=511 401=490 429=20 503=1"
    )
    assert " status=401 " in caplog.messages[-1]


def test_answers_and_model_failures_are_never_summed_up(
    log: AccessLog, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = [(200, "ok"), (500, "scoring_failed"), (503, "out_of_memory")]
    for status, code in outcomes * 20:
        log.write(Record(status=status, code=code))
    assert len(caplog.messages) == 60


def test_a_flood_that_is_over_is_logged_without_another_request(
    log: AccessLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(12):
        log.write(Record(status=404, code="not_found"))
    log.roll()
    assert len(caplog.messages) == REFUSAL_LINES_A_SECOND
    clock.now += 1
    log.roll()
    log.roll()
    assert caplog.messages[REFUSAL_LINES_A_SECOND:] == ["summed_up=2 404=2"]


def test_flush_loses_nothing_at_the_end(
    log: AccessLog, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(11):
        log.write(Record(status=401, code="unauthorized"))
    log.flush()
    log.flush()
    assert caplog.messages[REFUSAL_LINES_A_SECOND:] == ["summed_up=1 401=1"]


def test_outcomes_count_every_request_by_code(log: AccessLog) -> None:
    for code, status in [("ok", 200), ("busy", 429), ("ok", 200), ("client_gone", 499)]:
        log.write(Record(status=status, code=code))
    for _ in range(100):
        log.write(Record(status=401, code="unauthorized"))
    assert log.outcomes == {"busy": 1, "client_gone": 1, "ok": 2, "unauthorized": 100}


def test_the_observer_sees_every_record(clock: Clock) -> None:
    seen: list[Record] = []
    log = AccessLog(clock, observe=seen.append)
    records = [Record(status=401, code="unauthorized") for _ in range(30)]
    for record in records:
        log.write(record)
    assert seen == records
