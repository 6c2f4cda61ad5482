"""An expectation passes against the server it was recorded from, and names changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from probe_fakes import TOKEN, serving

from intern_decision_serve import probe
from intern_decision_serve.probe import expect


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def any_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake's times are all overhead: accept any ratio, and measure it once."""
    monkeypatch.setattr(expect, "_TOLERANCE", 1e9)
    monkeypatch.setattr(expect, "_ROUNDS", 1)


def expectation(url: str, *arguments: str) -> int:
    return probe.main([url, *arguments])


def differences() -> list[str]:
    document = json.loads(Path("probe-report.json").read_text("utf-8"))
    found: list[str] = document["sections"][0]["facts"]["differences"]
    return found


def test_a_recorded_server_is_as_expected(any_ratio: None) -> None:
    with serving() as fake:
        assert expectation(fake.url, "--record", "e.json") == 0
    with serving() as fake:  # another process would be another port
        assert expectation(fake.url, "--expect", "e.json") == 0
    assert differences() == []


def test_only_the_expectation_runs_unless_sections_are_named(any_ratio: None) -> None:
    with serving() as fake:
        expectation(fake.url, "--record", "e.json", "--sections", "chunking")
    document = json.loads(Path("probe-report.json").read_text("utf-8"))
    names = [section["name"] for section in document["sections"]]
    assert names == ["chunking", "expectation", "all"]


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (
            {"revision": "e" * 40},
            [f'pin revision: expected "{"f" * 40}", is "{"e" * 40}"'],
        ),
        ({"max_tokens": 3999}, ["limit max_tokens: expected 4000, is 3999"]),
        ({"vram_cap_gib": 8.0}, ["limit vram_cap_gib: expected null, is 8.0"]),
        (
            {"max_body_bytes": 70000},
            [
                (
                    'limit limits: expected {"max_body_bytes":65536}, is '
                    '{"max_body_bytes":70000}'
                )
            ],
        ),
    ],
)
def test_a_changed_pin_or_limit_is_named(
    any_ratio: None,
    change: dict[str, Any],
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving() as fake:
        expectation(fake.url, "--record", "e.json")
    with serving(**change) as fake:
        assert expectation(fake.url, "--expect", "e.json") == 1
    assert differences() == lines
    assert f"  difference  {lines[0]}\n" in capsys.readouterr().out


def test_changed_answers_are_named_with_their_question(any_ratio: None) -> None:
    with serving() as fake:
        expectation(fake.url, "--record", "e.json")
    with serving(seed="x") as fake:
        assert expectation(fake.url, "--expect", "e.json") == 1
    found = differences()
    assert len(found) == 8
    assert all(line.startswith("answer ") for line in found)


@pytest.mark.parametrize(
    ("seen", "status"), [([9.0, 9.0, 3.0], 0), ([3.0], 0), ([9.0, 9.0, 9.0], 1)]
)
def test_a_ratio_is_measured_again_before_it_is_a_difference(
    seen: list[float], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter([4.0, *seen])
    monkeypatch.setattr(expect, "_ratios", lambda _: {"a": next(measured)})
    with serving() as fake:
        assert expectation(fake.url, "--record", "e.json") == 0
        assert expectation(fake.url, "--expect", "e.json") == status
    assert next(measured, None) is None
    assert len(differences()) == status


RATIO = "latency ratio long over short: expected 4.00, within a factor of 2, is "
ONLY_THE_HASH = "same tops and probabilities, but its hash differs (tokens or prompt)"
OBSERVED: dict[str, Any] = {
    "server_version": "0.2",
    "pins": {"revision": "r", "device": "cpu"},
    "limits": {"max_tokens": 8192},
    "names": {"readout": "softmax"},
    "answers": {
        "plain": {"sha256": "1", "says": {"d": ["yes", 0.75]}},
        "shared": {"sha256": "2", "says": {"a": ["no", 0.5], "b": ["yes", 0.9]}},
    },
    "ratios": {"long over short": 4.0},
    "ratio_tolerance": 2.0,
}


def changed(**parts: Any) -> dict[str, Any]:
    return {**OBSERVED, **parts}


@pytest.mark.parametrize(
    ("observed", "lines"),
    [
        (OBSERVED, []),
        (
            changed(pins={"revision": "r", "dtype": "bf16"}),
            [
                'pin device: expected "cpu", is absent',
                'pin dtype: expected absent, is "bf16"',
            ],
        ),
        (
            changed(server_version="0.3"),
            ['server version: expected "0.2", is "0.3"'],
        ),
        (changed(names={}), ['name readout: expected "softmax", is absent']),
        (
            changed(answers={}),
            ["answer plain: not asked", "answer shared: not asked"],
        ),
        (
            changed(
                answers={
                    "plain": {"sha256": "x", "says": {"d": ["no", 0.51]}},
                    "shared": {
                        "sha256": "y",
                        "says": {"a": ["no", 0.5], "b": ["yes", 0.875]},
                    },
                }
            ),
            [
                "answer plain: d was 'yes', is 'no'",
                "answer shared: no top moved, b changed most: its probability by 0.025",
            ],
        ),
        (
            changed(
                answers={
                    **OBSERVED["answers"],
                    "plain": {"sha256": "x", "says": {"d": ["yes", 0.75]}},
                }
            ),
            ["answer plain: " + ONLY_THE_HASH],
        ),
        (changed(ratios={"long over short": 8.0}), []),
        (
            changed(ratios={"long over short": 8.1}),
            [RATIO + "8.10"],
        ),
        (
            changed(ratios={}),
            [RATIO + "not measured"],
        ),
    ],
)
def test_each_difference_is_one_line(
    observed: dict[str, Any], lines: list[str]
) -> None:
    assert list(expect.compare(OBSERVED, observed)) == lines


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is not an expectation of this probe"),
        ('{"format": "something else"}', "is not an expectation of this probe"),
        (
            json.dumps({"format": expect.FORMAT, "fixed_set": 0}),
            "was recorded with another fixed set: record it again",
        ),
    ],
)
def test_another_file_is_refused_before_any_question(
    text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("e.json").write_text(text, "utf-8")
    assert expectation("http://127.0.0.1:1", "--expect", "e.json") == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"pins": "none"}, "pins must be an object"),
        ({"limits": []}, "limits must be an object"),
        ({"names": 1}, "names must be an object"),
        ({"answers": None}, "answers must be an object"),
        ({"ratios": None}, "ratios must be an object"),
        ({"answers": {"plain": "x"}}, "answer plain must hold sha256 and"),
        ({"answers": {"plain": {"sha256": "x"}}}, "answer plain must hold sha256 and"),
        (
            {"answers": {"plain": {"sha256": "x", "says": {"d": ["yes"]}}}},
            "answer plain must hold sha256 and",
        ),
        ({"ratios": {"a": 0}}, "ratio a must be a number over 0"),
        ({"ratios": {"a": -2.0}}, "ratio a must be a number over 0"),
        ({"ratios": {"a": True}}, "ratio a must be a number over 0"),
        ({"ratios": {"a": float("nan")}}, "ratio a must be a number over 0"),
        ({"ratio_tolerance": 0}, "ratio_tolerance must be a number from 1 on"),
        ({"ratio_tolerance": 0.5}, "ratio_tolerance must be a number from 1 on"),
        ({"ratio_tolerance": "2"}, "ratio_tolerance must be a number from 1 on"),
        ({"ratio_tolerance": float("inf")}, "ratio_tolerance must be a number from"),
    ],
)
def test_a_file_edited_out_of_shape_is_told_as_one(
    parts: dict[str, Any], words: str
) -> None:
    whole = {
        "format": expect.FORMAT,
        "fixed_set": expect.FIXED_SET_VERSION,
        **changed(**parts),
    }
    Path("e.json").write_text(json.dumps(whole), "utf-8")
    with pytest.raises(ValueError, match=rf"^e\.json: {words}"):
        expect.read_expected(Path("e.json"))


@pytest.mark.parametrize("part", ["pins", "limits", "names", "answers", "ratios"])
def test_a_file_that_lacks_a_part_is_told_as_one(part: str) -> None:
    whole = {"format": expect.FORMAT, "fixed_set": expect.FIXED_SET_VERSION, **OBSERVED}
    Path("e.json").write_text(json.dumps(whole), "utf-8")
    assert expect.read_expected(Path("e.json")) == whole
    del whole[part]
    Path("e.json").write_text(json.dumps(whole), "utf-8")
    with pytest.raises(ValueError, match=f"{part} must be an object"):
        expect.read_expected(Path("e.json"))


def test_a_missing_file_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert expectation("http://127.0.0.1:1", "--expect", "none.json") == 2
    assert "none.json" in capsys.readouterr().err


@pytest.mark.torch
def test_the_demo_is_as_recorded_across_a_restart(
    demo_checkpoint: Any,
    demo_server: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real scoring in two processes; then a limit and an answer that were otherwise."""
    from demo_server import TOKEN as DEMO_TOKEN
    from demo_server import start_demo

    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", DEMO_TOKEN)
    monkeypatch.setattr(expect, "_TOLERANCE", 1e9)  # no timing on a shared machine
    assert expectation(demo_server.url, "--record", "e.json") == 0
    again = start_demo(Path(demo_checkpoint.path).parents[2], tmp_path / "again")
    try:
        again.wait_until_ready()
        assert expectation(again.url, "--expect", "e.json") == 0
    finally:
        assert again.stop() == 0
    recorded = json.loads(Path("e.json").read_text("utf-8"))
    recorded["limits"]["max_tokens"] = 8000
    recorded["answers"]["rotations"] = {"sha256": "0", "says": {}}
    Path("e.json").write_text(json.dumps(recorded), "utf-8")
    assert expectation(demo_server.url, "--expect", "e.json") == 1
    assert differences() == [
        "limit max_tokens: expected 8000, is 8192",
        "answer rotations: " + ONLY_THE_HASH,
    ]
