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

MEASURE = Path(__file__).with_name("measure.py")

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


CHECKS: dict[str, Check] = {
    "cold": check_startup,
    "kept": check_startup,
    "answers": check_answers,
    "service": check_service,
    "over_cap": check_over_cap,
    "kernels": check_kernels,
    "lost": check_lost,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not has_cuda():
        pytest.skip("no CUDA device on this machine")
    return tmp_path_factory.mktemp("gpu")


@pytest.mark.parametrize("section", CHECKS)
def test_the_section_measures_what_was_asked_for(section: str, folder: Path) -> None:
    out = folder / "out"
    command = [sys.executable, str(MEASURE), section, "--dir", str(folder)]
    path = [str(MEASURE.parents[2]), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    command += ["--out", str(out)]
    subprocess.run(command, env=environ, check=True, timeout=600)
    CHECKS[section](json.loads((out / f"{section}.json").read_text()))


def test_the_answers_are_the_same_across_a_restart(folder: Path) -> None:
    cold, kept = (
        json.loads((folder / "out" / f"{name}.json").read_text())["answers_sha256"]
        for name in ("cold", "kept")
    )
    assert cold == kept
