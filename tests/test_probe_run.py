"""The command: what it refuses, how it ends, what it leaves behind."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from probe_fakes import TOKEN, FakeServer, serving

import intern_decision_serve
from intern_decision_serve import probe
from intern_decision_serve.probe import expect, options, session
from intern_decision_serve.probe.client import Client
from intern_decision_serve.probe.progress import Progress
from intern_decision_serve.probe.rows import read_rows
from intern_decision_serve.probe.run import run

ROW = {
    "id": "r1",
    "state": {"door": "open"},
    "question": "Is it open?",
    "options": [{"id": "yes", "description": "o"}, {"id": "no", "description": "c"}],
    "label": "yes",
}


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    yield


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    with serving() as server:
        yield server


def rows_file(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    return path


def control_facts(stem: str) -> dict[str, Any]:
    document = json.loads(Path(f"{stem}.json").read_text("utf-8"))
    facts: dict[str, Any] = document["sections"][0]["facts"]
    return facts


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: url"),
        (["host:1"], "is not an http:// or https:// address"),
        (["http://u:secret@h"], "the address must carry no user or password"),
        (["http://h", "--sections", "controls"], "sections are control, repeat"),
        (["http://h", "--samples", "0"], "is not a whole number from 1 on"),
        (["http://h", "--seconds", "nan"], "is not a number of seconds over 0"),
        (["http://h", "--token", TOKEN], "unrecognized arguments: --token"),
        (["http://h", "--sections", "repeat", "--compare", "f"], "--compare needs"),
        (["http://h", "--expect", "e", "--compare", "f"], "--compare needs control"),
        (["http://h", "--record", "e", "--rows", "f"], "--rows needs control or"),
        (
            ["http://h", "--sections", "control", "--wait-restart", "9"],
            "--wait-restart needs repeat among the sections",
        ),
    ],
)
def test_bad_usage_is_exit_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probe.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_help_is_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.main(["--help"]) == 0
    assert "INTERN_DECISION_API_TOKEN" in capsys.readouterr().out


def test_an_unreachable_server_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert probe.main([f"http://127.0.0.1:{port}"]) == 2
    seen = f"probe: http://127.0.0.1:{port}/health: no answer ConnectionRefusedError\n"
    assert capsys.readouterr().err == seen


def test_a_refused_token_is_exit_2(
    fake: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", "another-token")
    assert probe.main([fake.url]) == 2
    seen = f"probe: {fake.url} refuses the token: 401 unauthorized\n"
    assert capsys.readouterr().err == seen


@pytest.mark.parametrize(
    ("environ", "content", "words"),
    [
        ({}, None, "no token: set INTERN_DECISION_API_TOKEN or give --token-file"),
        ({"INTERN_DECISION_API_TOKEN": "a"}, "b", "are both set"),
        ({}, "", "no token"),
        ({}, "two\nlines", "other than visible ASCII"),
        ({"INTERN_DECISION_API_TOKEN": "sécret"}, None, "other than visible ASCII"),
    ],
)
def test_the_token_has_one_source_and_is_never_named(
    environ: dict[str, str], content: str | None, words: str, tmp_path: Path
) -> None:
    path = None
    if content is not None:
        path = tmp_path / "token"
        path.write_text(content, "utf-8")
    with pytest.raises(ValueError, match=words) as error:
        options.read_token(Namespace(token_file=path), environ)
    assert "cret" not in str(error.value)


def test_one_newline_of_a_token_file_is_stripped(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n", "utf-8")
    assert options.read_token(Namespace(token_file=tmp_path / "token"), {}) == TOKEN


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "folder/x"], "x.html"),
        (["--out", "/proc/x"], "/proc/x"),
        (["--out", "/"], "empty name"),
        (["--record", "folder"], "folder"),
        (["--record", "file/e.json"], "file"),
        (["--record", "probe-report.json"], "would be written twice"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_any_question(
    fake: FakeServer, arguments: list[str], words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    Path("folder/x.html").mkdir(parents=True)
    Path("file").write_text("", "utf-8")
    before = fake.looks
    assert probe.main([fake.url, *arguments]) == 2
    assert words in capsys.readouterr().err
    assert fake.looks == before


def test_a_run_that_never_began_leaves_no_file() -> None:
    Path("probe-report.md").write_text("an earlier one", "utf-8")
    assert probe.main(["http://127.0.0.1:1", "--record", "new/e.json"]) == 2
    assert {path.name for path in Path().iterdir()} == {"new", "probe-report.md"}
    assert Path("probe-report.md").read_text("utf-8") == "an earlier one"
    assert list(Path("new").iterdir()) == []


def test_one_file_that_fails_at_the_end_loses_no_other(
    fake: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def turn_into_folders(*_: object) -> None:
        for name in ("probe-report.md", "e.json"):
            Path(name).mkdir()

    monkeypatch.setattr(expect, "_ratios", turn_into_folders)
    arguments = ["--sections", "calibration", "--record", "e.json"]
    assert probe.main([fake.url, *arguments]) == 2
    said = capsys.readouterr()
    assert "IsADirectoryError: " in said.out
    assert "probe-report.md" in said.err
    assert Path("probe-report.html").is_file()
    sections = json.loads(Path("probe-report.json").read_text("utf-8"))["sections"]
    assert [section["complete"] for section in sections] == [True, False, True]
    assert len(sections[1]["facts"]["recorded"]["answers"]) == 8


def test_sections_run_in_their_own_order() -> None:
    chosen = options.parse_options(["http://h", "--sections", "limits,control"])
    assert chosen.sections == ("control", "limits")
    assert options.parse_options(["http://h"]).sections == options.SECTIONS
    assert options.parse_options(["http://h", "--record", "f"]).sections == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"label": "maybe"}, "label 'maybe' is none of the option ids"),
        ({"options": None}, "line 2: "),
        ({"id": "r1"}, "line 2: id 'r1' is there twice"),
        ({"id": None}, "line 2: id must be a string, not null"),
        ({"id": 7}, "line 2: id must be a string, not 7"),
        ({"question": None}, "line 2: question must be a string, not null"),
        ({"question": {"a": 1}}, "line 2: question must be a string, not "),
        (
            {"options": [{"id": "a", "description": ["x"]}]},
            "line 2: description must be a string, not ",
        ),
        (
            {"options": [{"id": True, "description": "x"}]},
            "line 2: id must be a string, not true",
        ),
        ({"options": ["yes"]}, "line 2: an option must be a JSON object"),
        ({"options": [{"id": "a"}]}, "line 2: lacks 'description'"),
        ({"label": ["yes"]}, "line 2: label .* is none of the option ids"),
        ({"state": float("nan")}, "line 2: NaN is not JSON"),
    ],
)
def test_a_bad_row_names_its_line(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = rows_file(tmp_path / "rows.jsonl", ROW, {**ROW, "id": "r2", **change})
    with pytest.raises(ValueError, match=words):
        read_rows(path)


def test_a_row_may_hold_what_json_does_not_break_at(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    state = "one\u2028two\u2029three\x85four\x0b\x1c\x7f"
    row = json.dumps({**ROW, "state": state}, ensure_ascii=False)
    path.write_text(f"{row[:-1]}\r}}\r\n\n{json.dumps({**ROW, 'id': 'r2'})}\n", "utf-8")
    first, second = read_rows(path)
    assert (first.state, second.id) == (state, "r2")


def test_rows_in_another_encoding_name_their_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"id": "Tür"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"rows\.jsonl is not UTF-8: "):
        read_rows(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "must be a JSON object"),
        ("{}", "lacks 'options'"),
        (" \n", "no rows"),
        ('{"state": ' + "[" * 200_000, "line 1: "),
    ],
    ids=["list", "empty", "blank", "deep"],
)
def test_a_file_without_rows_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=words):
        read_rows(path)


def test_labelled_rows_give_accuracy_and_every_answer(
    fake: FakeServer, tmp_path: Path
) -> None:
    unlabelled = {name: v for name, v in ROW.items() if name != "label"}
    rows = rows_file(tmp_path / "rows.jsonl", ROW, {**unlabelled, "id": "r2"})
    assert probe.main([fake.url, "--sections", "control", "--rows", str(rows)]) == 0
    facts = control_facts("probe-report")
    assert [row["id"] for row in facts["rows"]] == ["r1", "r2"]
    assert facts["rows"][0] == {
        "id": "r1",
        "row_sha256": read_rows(rows)[0].sha256,
        "label": "yes",
        "top": facts["rows"][1]["top"],
        "option_ids": ["yes", "no"],
        "probabilities": facts["rows"][1]["probabilities"],
        "input_tokens": facts["rows"][1]["input_tokens"],
        "prompt_sha256": facts["rows"][1]["prompt_sha256"],
    }
    assert facts["accuracy"]["rows"] == 1
    assert facts["negative"]["rows"] == 2


def test_compare_sets_rows_against_an_earlier_run(fake: FakeServer) -> None:
    arguments = [fake.url, "--sections", "control"]
    assert probe.main([*arguments, "--out", "one"]) == 0
    assert probe.main([*arguments, "--out", "two", "--compare", "one.json"]) == 0
    assert control_facts("two")["compare"] == {
        "identical": 24,
        "numerically different": 0,
        "label moved": 0,
        "only in this run": 0,
        "only in the earlier run": 0,
        "largest": 0.0,
    }


def test_compare_names_a_moved_label_and_fails(
    fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [fake.url, "--sections", "control"]
    probe.main([*arguments, "--out", "one"])
    document = json.loads(Path("one.json").read_text("utf-8"))
    rows = document["sections"][0]["facts"]["rows"]
    rows[0]["top"] = "nothing"
    rows[1]["probabilities"][0] += 0.001
    rows[2]["row_sha256"] = "another question"
    Path("one.json").write_text(json.dumps(document), "utf-8")
    capsys.readouterr()
    assert probe.main([*arguments, "--out", "two", "--compare", "one.json"]) == 1
    compared = control_facts("two")["compare"]
    assert compared.pop("largest") == pytest.approx(0.001)
    assert compared == {
        "identical": 21,
        "numerically different": 1,
        "label moved": 1,
        "only in this run": 1,
        "only in the earlier run": 1,
    }
    assert "built-in-01: nothing -> " in capsys.readouterr().out


def test_compare_with_no_row_in_common_fails(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_file(tmp_path / "rows.jsonl", ROW)
    arguments = [fake.url, "--sections", "control"]
    probe.main([*arguments, "--out", "one"])
    arguments += ["--rows", str(rows), "--compare", "one.json", "--out", "two"]
    assert probe.main(arguments) == 1
    compared = control_facts("two")["compare"]
    assert (compared["only in this run"], compared["only in the earlier run"]) == (
        1,
        24,
    )
    assert "no label moved since the earlier run (0 rows compared)" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("section", ["control", "orderings", "calibration"])
def test_rows_go_with_each_section_that_reads_them(section: str) -> None:
    arguments = ["http://h", "--rows", "f", "--sections", section]
    assert options.parse_options(arguments).rows == Path("f")


def test_compare_with_another_file_is_refused_before_any_question(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}", "utf-8")
    assert probe.main([fake.url, "--compare", str(path)]) == 2
    assert "holds no control section" in capsys.readouterr().err


def test_no_labels_is_not_measured(fake: FakeServer, tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "rows.jsonl", {**ROW, "label": None})
    arguments = ["--sections", "control,calibration", "--rows", str(rows)]
    assert probe.main([fake.url, *arguments]) == 0
    document = json.loads(Path("probe-report.json").read_text("utf-8"))
    assert [
        (check["rule"], check["outcome"])
        for section in document["sections"]
        for check in section["checks"]
    ] == [
        ("every result is the contract's", "pass"),
        ("accuracy", "not measured"),
        ("every rotated row's result is the contract's", "pass"),
        ("calibration", "not measured"),
        ("every answer is one the probe asked for", "pass"),
    ]


def test_an_interrupt_writes_what_is_there_and_is_exit_130(tmp_path: Path) -> None:
    """SIGINT while the server holds an answer back: the report is there, marked."""
    root = Path(intern_decision_serve.__file__).parents[1]
    code = "import sys; from intern_decision_serve.probe import main; "
    command = [sys.executable, "-c", code + "sys.exit(main(sys.argv[1:]))"]
    with serving() as server:
        blocked = threading.Event()
        release = threading.Event()
        answer = server.predict

        def hold(request: dict[str, Any]) -> tuple[dict[str, Any], str]:
            if server.scored == 30:  # in the negative control
                blocked.set()
                release.wait(30)
            return answer(request)

        server_type = type(server)
        original = server_type.predict
        server_type.predict = lambda _, request: hold(request)  # type: ignore[method-assign]
        answer = original.__get__(server)
        try:
            process = subprocess.Popen(
                [*command, server.url, "--out", str(tmp_path / "cut")],
                env={**os.environ, "PYTHONPATH": str(root)},
                stdout=subprocess.PIPE,
            )
            assert blocked.wait(30)
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=30)
        finally:
            release.set()
            server_type.predict = original  # type: ignore[method-assign]
    assert process.returncode == 130
    assert b"incomplete, interrupted: " in said
    document = json.loads((tmp_path / "cut.json").read_text("utf-8"))
    assert document["complete"] is False
    assert [section["complete"] for section in document["sections"]] == [False, True]
    assert len(document["sections"][0]["facts"]["rows"]) == 24
    assert "**Incomplete: " in (tmp_path / "cut.md").read_text("utf-8")
    assert "Incomplete, interrupted" in (tmp_path / "cut.html").read_text("utf-8")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_for_terminals_only(fake: FakeServer) -> None:
    chosen = options.parse_options([fake.url, "--sections", "control"])
    terminal, pipe = Terminal(), io.StringIO()
    run(chosen, TOKEN, io.StringIO(), terminal)
    run(chosen, TOKEN, io.StringIO(), pipe)
    assert "control: row 1 of 24" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r" + " " * 78 + "\r")
    assert pipe.getvalue() == ""


def test_progress_shows_every_step_however_soon_it_comes() -> None:
    terminal = Terminal()
    progress = Progress(terminal)
    for step in ("one", "two", "the long one"):
        progress.step(step)
    shown = [line.strip() for line in terminal.getvalue().split("\r")[1:]]
    assert [line.split("s  ")[1] for line in shown] == ["one", "two", "the long one"]


def test_progress_cuts_long_lines() -> None:
    terminal = Terminal()
    Progress(terminal).step("x" * 500)
    assert len(terminal.getvalue()) == 79


@pytest.mark.parametrize(
    ("answers", "name", "kept"),
    [
        (10, "control", {"Accuracy", "Every row's answer"}),
        (10, "calibration", {"Scores", "Reliability"}),
        (10, "orderings", {"Rotations against plain", "Position bias"}),
        (60, "latency", {"By prompt length, one question"}),
    ],
)
def test_an_interrupted_section_reports_what_it_has(
    answers: int,
    name: str,
    kept: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interrupt comes while the client waits, after so many answers."""
    answered = 0
    post = Client.post

    def interrupted(self: Client, *arguments: Any, **more: Any) -> Any:
        nonlocal answered
        answered += 1
        if answered > answers:
            raise KeyboardInterrupt
        return post(self, *arguments, **more)

    monkeypatch.setattr(Client, "post", interrupted)
    with serving() as server:
        always = ["--seconds", "1000", "--samples", "40"]
        assert probe.main([server.url, "--sections", name, *always]) == 130
    document = json.loads(Path("probe-report.json").read_text("utf-8"))
    [section, _] = document["sections"]
    assert kept <= {table["title"] for table in section["tables"]}
    assert section["complete"] is False


def test_an_interrupt_keeps_the_samples_of_clients_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = session.Probe.at_once

    def interrupted(self: session.Probe, work: Any, clients: int) -> Any:
        original(self, work, clients)
        if clients == 2:
            raise KeyboardInterrupt
        return []

    monkeypatch.setattr(session.Probe, "at_once", interrupted)
    with serving() as server:
        always = ["--seconds", "0.01", "--samples", "3"]
        assert probe.main([server.url, "--sections", "latency", *always]) == 130
    facts = control_facts("probe-report")
    points = facts["by_clients"]
    assert [point["wall_ms"]["samples"] for point in points] == [3, 6]
    assert facts["health_under_load_ms"]["samples"] > 0
