"""A right server passes whatever its limits are; what does not fit is not measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from probe_fakes import TOKEN, FakeServer, serving

from intern_decision_serve import probe
from intern_decision_serve.errors import InvalidRequest
from intern_decision_serve.probe import expect


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
    monkeypatch.setattr(expect, "_TOLERANCE", 1e9)  # a fake's times are all overhead
    monkeypatch.setattr(expect, "_ROUNDS", 1)
    monkeypatch.chdir(tmp_path)


def measured(url: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """The sections of a run by name."""
    always = ["--seconds", "0.02", "--repeats", "2"]
    probe.main([url, *always, *arguments])
    document = json.loads(Path("probe-report.json").read_text("utf-8"))
    return {section["name"]: section for section in document["sections"]}


def checks(section: dict[str, Any], outcome: str) -> dict[str, str]:
    found = section["checks"]
    return {c["rule"]: c["seen"] for c in found if c["outcome"] == outcome}


SETTINGS: list[dict[str, Any]] = [
    {"max_tokens": 160},
    {"max_tokens": 512},
    {"max_tokens": 1024},
    {"max_tokens": 300_000},
    {"max_tokens": 300_000, "max_body_bytes": 4_000_000},
    {"max_decisions": 1},
    {"max_decisions": 2},
    {"max_decisions": 3},
    {"max_decisions": 8},
    {"max_decisions": 8000},
    {"max_body_bytes": 700},
    {"max_body_bytes": 4096},
    {"max_queue": 1},
    {"max_queue": 2},
    {"max_tokens": 512, "max_decisions": 2, "max_body_bytes": 1000, "max_queue": 3},
    {"vram_cap_gib": 2.0, "max_tokens": 300_000, "call_seconds": 0.001},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_right_server_passes_with_any_limits(settings: dict[str, Any]) -> None:
    with serving(**settings) as fake:
        every = "control,repeat,orderings,chunking,latency,limits,calibration"
        sections = measured(fake.url, "--record", "e.json", "--sections", every)
        again = measured(fake.url, "--expect", "e.json")
    for section in (*sections.values(), *again.values()):
        assert checks(section, "fail") == {}
        assert section["complete"]


def test_what_does_not_fit_is_named_with_the_limit() -> None:
    with serving(max_decisions=8) as fake:
        sections = measured(
            fake.url, "--record", "e.json", "--sections", "repeat,chunking,latency"
        )
    over = "17 orderings are over MAX_DECISIONS, 8"
    assert checks(sections["repeat"], "not measured") == {
        "repeating shared, 17 decisions": over,
        "the same answers after a restart": "no --wait-restart",
    }
    assert sections["chunking"]["conditions"].startswith("8 binary criteria")
    skipped = checks(sections["latency"], "not measured")
    assert skipped["16 questions"] == "16 orderings are over MAX_DECISIONS, 8"
    assert skipped["21 binary criteria"] == "21 orderings are over MAX_DECISIONS, 8"
    recorded = json.loads(Path("e.json").read_text("utf-8"))
    assert recorded["left_out"] == {"shared, 17 decisions": over}
    assert "shared, 17 decisions" not in recorded["answers"]
    assert list(recorded["ratios"]) == ["400 words over 40 words"]


def test_a_refusal_that_no_limit_explains_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = FakeServer.answer

    def refuse(self: FakeServer, path: str, document: Any) -> dict[str, Any]:
        if len(document.get("decisions", [])) > 4:
            raise InvalidRequest("no")
        return answer(self, path, document)

    monkeypatch.setattr(FakeServer, "answer", refuse)
    with serving(max_tokens=8192) as fake:
        sections = measured(fake.url, "--sections", "repeat,chunking,latency")
    for name in ("repeat", "chunking", "latency"):
        found = checks(sections[name], "fail")
        assert found == {
            "the section could go on": "/decide/shared answered 422 invalid_request"
        }
