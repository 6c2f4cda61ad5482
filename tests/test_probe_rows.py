"""A row the server refuses is named, and the rest is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from probe_fakes import TOKEN, FakeServer, serving

from intern_decision_serve import probe


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)


def row(name: str, **changes: Any) -> dict[str, Any]:
    options = [{"id": o, "description": f"it is {o}"} for o in ("yes", "no")]
    whole = {"state": "a door", "question": "Open?", "options": options, "label": "yes"}
    return {"id": name, **whole, **changes}


def measured(fake: FakeServer, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    """The sections of a run over these rows."""
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    sections = "control,orderings,calibration"
    probe.main([fake.url, "--rows", "rows.jsonl", "--sections", sections])
    document = json.loads(Path("probe-report.json").read_text("utf-8"))
    found: list[dict[str, Any]] = document["sections"][:3]
    return found


def failed(section: dict[str, Any]) -> dict[str, str]:
    checks = section["checks"]
    return {c["rule"]: c["seen"] for c in checks if c["outcome"] == "fail"}


def test_a_refused_row_is_named_and_the_rest_goes_on() -> None:
    rows = [row(f"r{number}", state=f"door {number}") for number in range(5)]
    rows[2]["state"] = "long " * 5000
    rows[3]["options"] *= 2  # two options with one id
    with serving() as fake:
        sections = measured(fake, *rows)
    for section in sections:
        assert section["complete"]
        assert failed(section) == {
            "every row is answered": "r2: 422 invalid_request; r3: 422 invalid_request"
        }
        named = section["facts"]["unanswered rows"]
        assert [one["id"] for one in named] == ["r2", "r3"]
        assert "tokens are over 4000" in named[0]["message"]
        assert "repeats" in named[1]["message"]
    control, orderings, calibration = (section["facts"] for section in sections)
    assert [one["id"] for one in control["rows"]] == ["r0", "r1", "r4"]
    assert control["accuracy"]["rows"] == control["negative"]["rows"] == 3
    assert (orderings["rows"], calibration["rows"]) == (3, 3)


def test_a_row_refused_only_when_rotated_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = FakeServer.answer

    def refuse(self: FakeServer, path: str, document: Any) -> dict[str, Any]:
        if (
            document["id"] == "r1"
            and document["options"][0]["description"] != "it is yes"
        ):
            document["options"] = []
        return answer(self, path, document)

    monkeypatch.setattr(FakeServer, "answer", refuse)
    with serving() as fake:
        control = measured(fake, row("r0"), row("r1"))[0]
    assert failed(control) == {
        "every rotated row is answered": "r1: 422 invalid_request"
    }
    assert control["facts"]["negative"]["rows"] == 1


def test_nothing_answered_is_nothing_measured() -> None:
    with serving(max_tokens=300) as fake:
        sections = measured(fake, row("r0", state="long " * 5000))
    skipped = [
        {c["rule"] for c in section["checks"] if c["outcome"] == "not measured"}
        for section in sections
    ]
    assert skipped[0] == {"accuracy", "negative control"}
    assert "orderings" in skipped[1]
    assert skipped[2] == {"calibration"}
