"""No measured text is sent twice, so that no cache of answers can flatter."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from probe_fakes import TOKEN, FakeServer, serving

from intern_decision_serve import probe
from intern_decision_serve.probe import expect
from intern_decision_serve.probe.samples import fixed_set


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counter[str]:
    """How often each body was asked, over all runs of a test."""
    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    counts: Counter[str] = Counter()
    answer = FakeServer.answer

    def counting(self: FakeServer, path: str, document: Any) -> dict[str, Any]:
        counts[json.dumps([path, document])] += 1
        return answer(self, path, document)

    monkeypatch.setattr(FakeServer, "answer", counting)
    return counts


def test_latency_sends_no_text_twice_in_two_runs(asked: Counter[str]) -> None:
    always = ["--sections", "latency", "--seconds", "0.02", "--samples", "3"]
    with serving(max_queue=32) as fake:
        for _ in range(2):
            assert probe.main([fake.url, *always]) == 0
    repeated = {body for body, times in asked.items() if times > 1}
    assert len(asked) > 100
    assert len(repeated) == 1  # the one that tries the token
    assert "built-in-01" in repeated.pop()


def test_only_the_fixed_set_is_the_same_in_every_expectation(
    asked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expect, "_TOLERANCE", 1e9)
    with serving() as fake:
        for option in ("--record", "--expect"):
            assert probe.main([fake.url, option, "e.json"]) == 0
    fixed = {json.dumps([path, body]) for _, path, body in fixed_set()}
    repeated = {body for body, times in asked.items() if times > 1}
    assert repeated == fixed  # one of them tries the token, too


def test_long_requests_of_clients_that_leave_differ(asked: Counter[str]) -> None:
    with serving(max_queue=8, call_seconds=0.005) as fake:
        probe.main([fake.url, "--sections", "limits"])
    long = {body: times for body, times in asked.items() if "criterion-9" in body}
    assert len(long) > 4
    assert set(long.values()) == {1}
