"""What the issue asks of an H200, asserted section by section; skipped without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent

pytestmark = pytest.mark.gpu

Check = Callable[[dict[str, Any]], None]


def has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def check_startup(result: dict[str, Any]) -> None:
    """No first request of a length waits more than twice its median."""
    assert all(row["ratio"] <= 2.0 for row in result["first_requests"])
    rungs = result["warmup"]["rungs"]
    assert all(rung["outcome"] == "scored" for rung in rungs)


def check_answers(result: dict[str, Any]) -> None:
    assert result["status_200"] == result["requests"] >= 200
    assert result["http_differs_from_direct"] == 0
    assert result["score_differs_from_direct_or_repeat"] == 0
    assert result["swap_differs"] == 0
    assert result["swap_freed_mib"] > 600
    assert result["inference_threads"] == 1


def check_service(result: dict[str, Any]) -> None:
    assert result["throughput_long"]["answers_differ"] == 0
    assert result["throughput_short"]["answers_differ"] == 0
    assert result["throughput_long"]["ratio"] >= 1.10
    assert result["throughput_short"]["ratio"] >= 0.98
    assert result["soak"]["statuses"] == {"200": 1000}
    first, last = result["soak"]["readings"][1], result["soak"]["readings"][-1]
    assert last["driver_mib"] - first["driver_mib"] <= 512
    assert last["reserved_mib"] <= last["baseline_mib"] + 512
    assert result["inference_threads"] == 1


def check_over_cap(result: dict[str, Any]) -> None:
    repeats = result["repeats"]
    assert result["over_cap_503"] == repeats
    assert result["next_200"] == result["next_answer_same"] == repeats
    assert result["reserved_mib_most"] <= result["before"]["baseline_mib"] + 512


def check_kernels(result: dict[str, Any]) -> None:
    hidden = result["fla_hidden_without_switch"]
    assert hidden["exit_status"] == 78
    assert "chunk_gated_delta_rule" in hidden["last_line"]
    served = result["fla_hidden_with_switch"]
    assert served["status"] == 200 and served["warned"]
    assert not any(report["fast"] for report in served["kernels"].values())


def check_lost(result: dict[str, Any]) -> None:
    assert result["exit_status"] == 70
    assert result["at_once"][0] == [503, "engine_failed"]
    assert {status for status, _ in result["at_once"]} <= {200, 503}
    assert result["logged"]


def check_pass(row: dict[str, Any]) -> None:
    """Every answer is the model's own, bit for bit, in the engine and over HTTP."""
    assert row["status_200"] == row["requests"] > 0 < row["calls"]
    assert row["differ_from_eager"] == row["differ_over_http"] == row["refusals"] == 0


def check_exact(result: dict[str, Any]) -> None:
    *replayed, last = result["passes"]
    for row in result["passes"]:
        check_pass(row)
    assert all(row["hits"] > 0 for row in replayed)
    assert sum(row["requests"] for row in replayed[:2]) == 500
    assert any(row["evictions"] > 0 for row in replayed)
    broken = result["broken_capture"]
    assert set(broken["statuses"]) == {200} and broken["held_before"] > 0
    assert broken["graphs_after"] is last["held"] is None
    outcomes = [row["outcome"] for row in result["out_of_memory"]]
    assert outcomes == ["scored", "503 out_of_memory"]
    assert all(row["held_after"] == 0 for row in result["out_of_memory"])
    assert (result["inference_threads"], result["status"]) == (1, "ok")


def check_restart(result: dict[str, Any]) -> None:
    (row,) = result["passes"]
    check_pass(row)
    assert row["hits"] > 0


def check_speed(result: dict[str, Any]) -> None:
    small, *larger = result["http_medians"]
    orderings = result["orderings"]
    assert small["ratio"] <= 0.35 and orderings["ratio"] <= 0.6
    assert all(row["ratio"] <= 0.5 for row in larger)
    for row in (small, *larger, orderings):
        assert row["answers_differ"] == 0 < row["hits"]


def check_once(result: dict[str, Any]) -> None:
    assert result["ratio_of_medians"] <= 1.02


def check_memory(result: dict[str, Any]) -> None:
    for name, pool_mib in (("1024_mib", 1024), ("256_mib", 256)):
        assert all(row["most_held"] <= 64 for row in result[name])
        assert 0 < result[name][-1]["most_pool_mib"] <= pool_mib
    rows = result["1024_mib"]
    assert rows[-1]["shapes"] == 200
    assert rows[-1]["driver_mib"] - rows[1]["driver_mib"] <= 512
    assert result["status"] == "ok"


def check_floods(result: dict[str, Any]) -> None:
    assert all(row["ratio"] <= 1.1 and row["hits"] > 0 for row in result["replayed"])


CHECKS: dict[str, dict[str, Check]] = {
    "measure.py": {
        "cold": check_startup,
        "kept": check_startup,
        "answers": check_answers,
        "service": check_service,
        "over_cap": check_over_cap,
        "kernels": check_kernels,
        "lost": check_lost,
    },
    "replay.py": {
        "exact": check_exact,
        "restart": check_restart,
        "speed": check_speed,
        "once": check_once,
        "memory": check_memory,
        "floods": check_floods,
    },
}
SECTIONS = [(script, name) for script, checks in CHECKS.items() for name in checks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not has_cuda():
        pytest.skip("no CUDA device on this machine")
    return tmp_path_factory.mktemp("gpu")


@pytest.mark.parametrize(("script", "section"), SECTIONS)
def test_the_section_measures_what_was_asked_for(
    script: str, section: str, folder: Path
) -> None:
    out = folder / "out"
    command = [sys.executable, str(FOLDER / script), section, "--dir", str(folder)]
    path = [str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    command += ["--out", str(out)]
    subprocess.run(command, env=environ, check=True, timeout=600)
    CHECKS[script][section](json.loads((out / f"{section}.json").read_text()))


@pytest.mark.parametrize("sections", [("cold", "kept"), ("exact", "restart")])
def test_the_answers_are_the_same_across_a_restart(
    sections: tuple[str, str], folder: Path
) -> None:
    before, after = (
        json.loads((folder / "out" / f"{name}.json").read_text())["answers_sha256"]
        for name in sections
    )
    assert before == after
