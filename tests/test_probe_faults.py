"""The probe passes a good server and names each fault planted in a bad one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import probe_fakes
import pytest
from probe_fakes import FAULTS, TOKEN, serving

from intern_decision_serve import probe
from intern_decision_serve.probe import limits, queueing, rawpost, sampling, wire
from intern_decision_serve.probe.options import SECTIONS


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the probe on a URL: the exit status and the JSON report."""
    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
    # How long a bad server is waited for; a good one is ready at once.
    monkeypatch.setattr(queueing, "_SETTLE_SECONDS", 0.5)

    def run(url: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        out = tmp_path / "reports" / "report"
        always = ["--seconds", "0.05", "--repeats", "2", "--out", str(out)]
        status = probe.main([url, *always, *arguments])
        return status, json.loads(out.with_name("report.json").read_text("utf-8"))

    return run


def outcomes(report: dict[str, Any]) -> dict[str, str]:
    return {
        check["rule"]: check["outcome"]
        for section in report["sections"]
        for check in section["checks"]
    }


def failures(report: dict[str, Any]) -> dict[str, str]:
    return {
        check["rule"]: check["seen"]
        for section in report["sections"]
        for check in section["checks"]
        if check["outcome"] == "fail"
    }


def test_a_good_server_passes_every_section(measure: Any) -> None:
    with serving() as fake:
        status, report = measure(fake.url)
    assert failures(report) == {}
    assert (status, report["complete"], report["failed_checks"]) == (0, True, 0)
    assert [section["name"] for section in report["sections"]] == [
        "control", "repeat", "orderings", "chunking", "latency", "limits",
        "calibration", "all",
    ]  # fmt: skip
    skipped = {rule for rule, o in outcomes(report).items() if o == "not measured"}
    # a fake is mostly too fast to tell the time of
    assert skipped - {"a client that closes frees its place"} == {
        "the same answers after a restart",
        "16 criteria, 3,900-token state",
        "over the VRAM cap is a 503, and memory returns to the baseline",
    }
    assert all(answer["expected"] for answer in report["answers"])


def test_a_server_that_reports_only_the_contracts_health_passes(measure: Any) -> None:
    with serving(reports=False) as fake:
        status, report = measure(
            fake.url, "--max-queue", "4", "--max-body-bytes", "65536"
        )
    assert failures(report) == {}
    assert status == 0
    assert report["conditions"]["server version"] == "not reported"
    assert outcomes(report)["queue under load"] == "not measured"


# fault, section that finds it, settings of the server, the rules that fail
PLANTED = [
    (
        "shuffles results",
        "chunking",
        {},
        {
            "results come back in request order",
            "call says index, field and questions truly",
            "timing counts the calls",
            "chunked is as asked chunk by chunk",
        },
    ),
    (
        "swaps answers between calls",
        "chunking",
        {},
        {"chunked is as asked chunk by chunk"},
    ),
    ("ignores the token", "limits", {}, {"401 without the right token"}),
    (
        "drops the body cap",
        "limits",
        {},
        {"413 for one byte more, declared", "413 for one byte more, streamed"},
    ),
    (
        "drops the VRAM cap",
        "limits",
        {"vram_cap_gib": 2.0, "largest_tokens": 2000},
        {"over the VRAM cap is a 503, and memory returns to the baseline"},
    ),
    (
        "keeps memory after running out",
        "limits",
        {"vram_cap_gib": 2.0, "largest_tokens": 2000},
        {"over the VRAM cap is a 503, and memory returns to the baseline"},
    ),
    (
        "answers a closed client",
        "limits",
        {"call_seconds": 0.02, "max_queue": 8},
        {"a client that closes frees its place"},
    ),
    (
        "repeats unstably",
        "repeat",
        {},
        {"the same answers when asked again", "the same answers while others ask"},
    ),
    (
        "lies about call.index",
        "chunking",
        {},
        {"call says index, field and questions truly"},
    ),
    (
        "queues without bound",
        "limits",
        {},
        {"429 past the queue, before the body is read"},
    ),
    (
        "refuses without Retry-After",
        "limits",
        {},
        {"429 past the queue, before the body is read"},
    ),
    (
        "combines by arithmetic mean",
        "orderings",
        {},
        {
            "rotations are the n shifts, each a result, combined as the contract says",
            "all gives every permutation, combined as the contract says",
        },
    ),
    (
        "keeps the place of a client that left",
        "limits",
        {"call_seconds": 0.02, "max_queue": 8},
        {"no client that left keeps a place"},
    ),
    (
        "knows only the token's beginning",
        "limits",
        {},
        {"401 without the right token"},
    ),
    (
        "lets /health wait for the model",
        "limits",
        {"call_seconds": 0.02},
        {"/health answers while a call runs"},
    ),
    (
        "slows /health down while it is full",
        "limits",
        {},
        {"/health answers while the queue is full"},
    ),
    (
        "asks to come back in 3000 years",
        "limits",
        {},
        {"429 past the queue, before the body is read"},
    ),
    ("accepts NaN", "limits", {}, {"422 for each rule"}),
]


@pytest.mark.parametrize(
    ("fault", "section", "settings", "rules"), PLANTED, ids=[row[0] for row in PLANTED]
)
def test_a_planted_fault_is_named(
    measure: Any,
    fault: str,
    section: str,
    settings: dict[str, Any],
    rules: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "/health" in fault:  # a slow one is a little slow here, so that tests are fast
        monkeypatch.setattr(queueing, "_SLOW_HEALTH_SECONDS", 0.02)
        monkeypatch.setattr(queueing, "_LATE_HEALTH_SECONDS", 0.02)
        monkeypatch.setattr(sampling, "_WATCH_SECONDS", 0.001)
    with serving(fault, **settings) as fake:
        status, report = measure(fake.url, "--sections", section)
    ours = set(failures(report)) - {"every answer is one the probe asked for"}
    assert ours == rules
    assert status == 1


def test_a_server_that_resets_is_counted_not_retried(measure: Any) -> None:
    with serving("resets now and then") as fake:
        status, report = measure(fake.url, "--sections", "control")
    assert status == 1
    assert failures(report) == {
        "the section could go on": "/decide answered no answer RemoteDisconnected",
        "every answer is one the probe asked for": "1 of 8 answers are not",
    }
    assert report["answers"][-1] == {
        "section": "control",
        "answer": "no answer RemoteDisconnected",
        "count": 1,
        "expected": False,
    }


def test_running_out_of_memory_under_the_cap_passes(measure: Any) -> None:
    with serving(vram_cap_gib=2.0, largest_tokens=2000) as fake:
        status, report = measure(fake.url, "--sections", "limits")
    assert failures(report) == {}
    assert status == 0
    rule = "over the VRAM cap is a 503, and memory returns to the baseline"
    assert outcomes(report)[rule] == "pass"


def test_a_client_that_closes_frees_its_place(measure: Any) -> None:
    with serving(call_seconds=0.02, max_queue=8) as fake:
        status, report = measure(fake.url, "--sections", "limits")
    assert failures(report) == {}
    assert outcomes(report)["a client that closes frees its place"] == "pass"


def test_one_slow_round_is_no_fault(
    measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = queueing._leave
    rounds = 0

    def slow_once(*arguments: Any) -> tuple[float | None, float, int | None]:
        nonlocal rounds
        rounds += 1
        freed, waited, held = leave(*arguments)
        return freed, waited + 100 * (rounds == 1), held

    monkeypatch.setattr(queueing, "_leave", slow_once)
    with serving(call_seconds=0.02, max_queue=8) as fake:
        status, report = measure(fake.url, "--sections", "limits")
    assert failures(report) == {}
    assert rounds > 1


def test_a_cap_that_the_largest_call_fits_under_claims_nothing(measure: Any) -> None:
    with serving(vram_cap_gib=2.0) as fake:
        status, report = measure(fake.url, "--sections", "limits")
    [check] = [
        check
        for check in report["sections"][0]["checks"]
        if check["rule"].startswith("over the VRAM cap")
    ]
    assert check["outcome"] == "not measured"
    assert check["seen"] == (
        "not reached: the largest legal call fits, peak 1024.0 MiB of 2048 MiB"
    )
    assert status == 0


def test_a_server_that_waits_for_the_body_before_429_fails(measure: Any) -> None:
    with serving("reads the body before refusing") as fake:
        status, report = measure(fake.url, "--sections", "limits")
    assert "429 past the queue, before the body is read" in failures(report)
    assert status == 1


def test_an_answer_of_another_shape_ends_its_section_in_words(
    measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from probe_fakes import FakeServer

    def wrong(self: FakeServer, path: str, document: object) -> dict[str, Any]:
        return {"results": None, "id": "x"}

    monkeypatch.setattr(FakeServer, "answer", wrong)
    with serving() as fake:
        status, report = measure(fake.url, "--sections", "control,chunking")
    assert status == 1
    seen = {
        (section["name"], check["seen"].replace("object of type 'NoneType' has ", ""))
        for section in report["sections"]
        for check in section["checks"]
        if check["rule"] == "the section could go on"
    }
    assert seen == {
        ("control", "an answer had another shape: KeyError: 'top'"),
        ("chunking", "an answer had another shape: TypeError: no len()"),
    }


HUGE = b"9" * 401


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"probabilities": [', b'"probabilities": [' + HUGE + b", "),
        (b'"total_seconds": ', b'"total_seconds": ' + HUGE),
        (b'"input_tokens": ', b'"input_tokens": ' + HUGE),
        (b'"results": [', b'"results": [' + b"[" * 200_000),
        (b'"results": [', b'"results": [' + b"[" * 500 + b"]" * 500 + b", "),
        (b'"id": ', b'"id": ' + b'{"a":' * 50 + b"1" + b"}" * 50 + b', "was": '),
    ],
    ids=["probabilities", "seconds", "tokens", "deep", "500 levels", "50 levels"],
)
def test_no_answer_ends_the_run(
    measure: Any, monkeypatch: pytest.MonkeyPatch, old: bytes, new: bytes
) -> None:
    """Each section goes as far as it can, and the report is written."""
    plain = probe_fakes.to_bytes

    def spoilt(body: object) -> bytes:
        return plain(body).replace(old, new)

    monkeypatch.setattr(probe_fakes, "to_bytes", spoilt)
    with serving() as fake:
        status, report = measure(fake.url)
    assert status in (0, 1)  # which section notices is not the matter here
    assert [section["name"] for section in report["sections"]] == [*SECTIONS, "all"]


def test_an_endless_answer_is_counted_and_ends_its_section_only(
    measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MOST_ANSWER_BYTES", 4000)  # 40 results are more
    with serving() as fake:
        status, report = measure(fake.url, "--sections", "chunking,limits")
    assert status == 1
    assert failures(report)["the section could go on"] == (
        "/decide/shared answered no answer TooLarge"
    )
    assert outcomes(report)["401 without the right token"] == "pass"


@pytest.mark.parametrize(
    ("error", "outcome", "words"),
    [
        (
            wire.NoDescriptors("Too many open files: raise `ulimit -n`"),
            ("the rest of the section", "not measured"),
            "Too many open files: raise `ulimit -n`",
        ),
        (
            PermissionError("not here"),
            ("the section could go on", "fail"),
            "PermissionError: not here",
        ),
        (
            RuntimeError("can't start new thread"),
            ("the section could go on", "fail"),
            "RuntimeError: can't start new thread",
        ),
    ],
    ids=["descriptors", "another", "threads"],
)
def test_an_error_of_this_machine_ends_its_section_in_words(
    measure: Any,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    outcome: tuple[str, str],
    words: str,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(rawpost, "open_socket", fail)
    if not isinstance(error, wire.NoDescriptors):
        monkeypatch.setattr(limits, "check_full_queue", fail)
    with serving() as fake:
        status, report = measure(fake.url, "--sections", "limits,calibration")
    assert status == (outcome[1] == "fail")
    limits_section, calibration, _ = report["sections"]
    assert limits_section["complete"] is False
    assert limits_section["checks"][-1] == {
        "rule": outcome[0],
        "outcome": outcome[1],
        "seen": words,
    }
    assert calibration["complete"] is True


def test_a_server_gone_before_the_queue_is_filled_keeps_what_was_measured(
    measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(rawpost, "open_socket", refuse)
    with serving() as fake:
        status, report = measure(fake.url, "--sections", "control,limits")
    assert status == 1
    assert failures(report)["every admitted request is answered"].startswith(
        "no answer ConnectionRefusedError; "
    )
    assert outcomes(report)["422 for each rule"] == "pass"
    assert len(report["sections"][0]["facts"]["rows"]) == 24


def test_a_health_nested_too_deeply_is_no_health(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INTERN_DECISION_API_TOKEN", TOKEN)
    monkeypatch.setattr(probe_fakes, "to_bytes", lambda body: b"[" * 200_000)
    with serving() as fake:
        assert probe.main([fake.url]) == 2
    said = f"probe: {fake.url}/health: 200 without a JSON object\n"
    assert capsys.readouterr().err == said


def test_every_fault_is_tried() -> None:
    tried = {row[0] for row in PLANTED} | {
        "resets now and then",
        "reads the body before refusing",
        "echoes the token",  # test_probe_report
    }
    assert tried == FAULTS
