"""A restart in the middle: waited for, told from an absence, and looked at."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from probe_fakes import TOKEN, FakeServer, serving, serving_again

from intern_decision_serve import probe
from intern_decision_serve.probe import restart

SAME_ANSWERS = "the same answers after a restart"
SAME_PINS = "the same pins after a restart"


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
    monkeypatch.setattr(restart, "_POLL_SECONDS", 0.005)
    monkeypatch.chdir(tmp_path)


def repeat(url: str, wait: str = "30") -> int:
    arguments = ["--sections", "repeat", "--repeats", "1", "--wait-restart", wait]
    return probe.main([url, *arguments])


def section() -> dict[str, Any]:
    document = json.loads(Path("probe-report.json").read_text("utf-8"))
    found: dict[str, Any] = document["sections"][0]
    return found


def outcomes() -> dict[str, str]:
    return {check["rule"]: check["outcome"] for check in section()["checks"]}


class Restarter(io.StringIO):
    """Acts before the line that asks for a restart was written."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.act = act

    def write(self, text: str) -> int:
        if "restart the server now" in text:
            self.act()
        return super().write(text)


def when_asked(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    monkeypatch.setattr(sys, "stderr", Restarter(act))


@pytest.mark.parametrize(("seed", "status"), [("", 0), ("another checkpoint", 1)])
def test_a_restart_is_waited_for_and_seen(seed: str, status: int) -> None:
    ended: list[int] = []
    with serving() as server:
        thread = threading.Thread(target=lambda: ended.append(repeat(server.url)))
        thread.start()
        while server.looks < 4:  # one to open, one before the wait, two in it
            assert thread.is_alive()
    server.seed = seed
    with serving_again(server):
        thread.join(30)
    assert ended == [status]
    assert outcomes()[SAME_ANSWERS] == ("fail" if status else "pass")
    assert outcomes()[SAME_PINS] == "pass"
    assert section()["facts"]["changed_by_restart"] == []


def test_a_restart_as_soon_as_it_is_asked_for_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving() as server:
        when_asked(monkeypatch, server.restart)
        assert repeat(server.url) == 0
    assert outcomes()[SAME_ANSWERS] == "pass"


def test_an_absence_of_a_server_that_lives_on_is_no_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving() as server:
        when_asked(monkeypatch, lambda: setattr(server, "stopping_looks", 3))
        assert repeat(server.url, "0.3") == 0
    assert server.stopping_looks == 0
    assert outcomes()[SAME_ANSWERS] == "not measured"
    assert SAME_PINS not in outcomes()


def test_an_absence_is_enough_where_the_age_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(reports=False) as server:
        when_asked(monkeypatch, lambda: setattr(server, "stopping_looks", 3))
        assert repeat(server.url) == 0
    assert outcomes()[SAME_ANSWERS] == "pass"


def test_what_restarted_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def restart_another(server: FakeServer) -> None:
        server.revision, server.max_tokens = "e" * 40, 3000
        server.restart()

    with serving() as server:
        when_asked(monkeypatch, lambda: restart_another(server))
        assert repeat(server.url) == 1
    assert outcomes()[SAME_ANSWERS] == "pass"
    assert outcomes()[SAME_PINS] == "fail"
    [table] = section()["tables"]
    assert table["rows"] == [["max_tokens", "4000", "3000"]]


def test_later_sections_go_by_what_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    def restart_smaller(server: FakeServer) -> None:
        server.max_tokens, server.max_decisions = 3000, 20
        server.restart()

    with serving() as server:
        when_asked(monkeypatch, lambda: restart_smaller(server))
        sections = ["--sections", "repeat,chunking", "--repeats", "1"]
        assert probe.main([server.url, *sections, "--wait-restart", "30"]) == 0
    document = json.loads(Path("probe-report.json").read_text("utf-8"))
    assert document["sections"][1]["conditions"].startswith("20 binary criteria")


def test_no_restart_is_not_measured() -> None:
    with serving() as server:
        assert repeat(server.url, "0.05") == 0
    assert "no restart was seen" in Path("probe-report.md").read_text("utf-8")
