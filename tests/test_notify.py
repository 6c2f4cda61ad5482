"""What systemd is told, and when its watchdog is left to starve."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from intern_decision_serve import notify


@pytest.fixture(params=["path", "abstract"])
def manager(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[socket.socket]:
    """A datagram socket in systemd's part, by both spellings of its address."""
    path = tmp_path / "n"
    name = f"intern-decision-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path) if request.param == "path" else "\0" + name)
        listener.settimeout(10)
        monkeypatch.setenv(
            "NOTIFY_SOCKET", str(path) if request.param == "path" else "@" + name
        )
        yield listener


@pytest.mark.parametrize(
    ("send", "message"),
    [
        (notify.ready, b"READY=1"),
        (notify.stopping, b"STOPPING=1"),
        (notify.watchdog, b"WATCHDOG=1"),
        (lambda: notify.status("loading"), b"STATUS=loading"),
        (lambda: notify.status("größe"), "STATUS=größe".encode()),
        (lambda: notify.extend_timeout(90), b"EXTEND_TIMEOUT_USEC=90000000"),
        (lambda: notify.extend_timeout(0.5), b"EXTEND_TIMEOUT_USEC=500000"),
    ],
)
def test_each_message_is_one_datagram(
    manager: socket.socket, send: Callable[[], None], message: bytes
) -> None:
    send()
    assert manager.recv(4096) == message


def test_a_status_text_cannot_claim_readiness(manager: socket.socket) -> None:
    notify.status("warming up\nREADY=1\r\n")
    assert manager.recv(4096) == b"STATUS=warming up READY=1"


def test_without_systemd_nothing_is_sent() -> None:
    assert notify.notify("READY=1", {}) is False


@pytest.mark.parametrize("address", ["", "relative/path", "vsock:2:1234"])
def test_an_address_of_another_kind_is_left_alone(address: str) -> None:
    assert notify.notify("READY=1", {"NOTIFY_SOCKET": address}) is False


def test_a_lost_message_is_logged_and_not_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"NOTIFY_SOCKET": str(tmp_path / "gone")}
    assert notify.notify("WATCHDOG=1", environ) is False
    assert "could not notify systemd of WATCHDOG=1" in caplog.text


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "180000000"}, 180.0),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getpid())}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": ""}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
        ({"WATCHDOG_USEC": "1e9"}, None),
        ({"WATCHDOG_USEC": "²"}, None),
    ],
)
def test_the_watchdog_time_is_read_only_where_it_is_ours(
    environ: dict[str, str], seconds: float | None
) -> None:
    assert notify.watchdog_seconds(environ) == seconds


class Fed:
    """Counts what the watchdog was fed."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


class Clock:
    """Stands in for the stop event: every wait moves the call's age, none sleeps."""

    def __init__(self, waits: int, age_seconds: float | None) -> None:
        self.waits = waits
        self.age_seconds = age_seconds
        self.waited: list[float] = []

    def wait(self, timeout: float) -> bool:
        self.waited.append(timeout)
        if self.age_seconds is not None:
            self.age_seconds += timeout
        return len(self.waited) >= self.waits


def test_an_idle_engine_keeps_the_watchdog_fed() -> None:
    fed, clock = Fed(), Clock(waits=50, age_seconds=None)
    notify.Watchdog(lambda: clock.age_seconds, 180, feed=fed).run(clock)
    assert fed.count == 50
    assert clock.waited == [60.0] * 50


def test_a_blocked_engine_starves_the_watchdog(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fed, clock = Fed(), Clock(waits=50, age_seconds=0.0)
    notify.Watchdog(lambda: clock.age_seconds, 180, feed=fed).run(clock)
    assert fed.count == 2  # at 0 s and 60 s; systemd ends it at 60 + 180 s
    assert [r.getMessage() for r in caplog.records] == [
        "the running call is over 90 s old: watchdog no longer fed"
    ]


def test_a_call_that_ends_lets_the_feeding_go_on() -> None:
    ages = iter([None, 500.0, None, 1.0])
    dog = notify.Watchdog(lambda: next(ages), 180, feed=Fed())
    assert [dog.feed_once() for _ in range(4)] == [True, False, True, True]


@pytest.mark.parametrize(
    ("age_seconds", "fed"), [(None, True), (0.0, True), (30.0, True), (30.1, False)]
)
def test_only_a_young_call_is_fed_for(age_seconds: float | None, fed: bool) -> None:
    dog = notify.Watchdog(lambda: age_seconds, 180, 30, feed=Fed())
    assert dog.feed_once() is fed


@pytest.mark.parametrize("began_seconds", range(0, 60, 7))
def test_a_hung_call_is_ended_between_once_and_one_and_a_half_times_the_limit(
    began_seconds: int,
) -> None:
    now_seconds, heard_seconds = 0.0, 0.0

    def running_age_seconds() -> float | None:
        age_seconds = now_seconds - began_seconds
        return age_seconds if age_seconds >= 0 else None

    dog = notify.Watchdog(running_age_seconds, 180, feed=Fed())
    while now_seconds < 1000:
        if dog.feed_once():
            heard_seconds = now_seconds
        now_seconds += dog.interval_seconds
    ended_seconds = heard_seconds + 180 - began_seconds
    assert 180 <= ended_seconds <= 270


def test_the_watchdog_feeds_systemd_by_default(manager: socket.socket) -> None:
    assert notify.Watchdog(lambda: None, 180).feed_once() is True
    assert manager.recv(4096) == b"WATCHDOG=1"
