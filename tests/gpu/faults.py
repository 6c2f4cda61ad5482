"""Sections that need the engine to fail: over the cap, slow kernels, a lost context."""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from client import run_client
from served import TOKEN, Options, Served, ask
from shapes import fit, systemone

ROOT = Path(__file__).parents[2]
OVER_CAP_MIB = 1024  # Triton's autotuner alone takes 256 MiB to flush the L2 cache
OVER_CAP_REPEATS = 50
START_SECONDS = 240.0


def measure_over_cap(options: Options) -> dict[str, Any]:
    """A cap just over the resident size: 503, the baseline again, then a 200."""
    cap_gib = find_narrow_cap(options)
    served = Served(
        options,
        VRAM_CAP_GIB=str(cap_gib),
        MAX_TOKENS="16384",
        WARMUP_TOKENS="256",
    )
    small = systemone(1, 40, 1)
    large = fit(served.count_tokens, lambda words: systemone(2, words, 1), 14000)
    first = served.ask("/v1/systemone", small)[1]["answers"]
    before = served.memory()
    rows = [_exceed(served, large, small) for _ in range(OVER_CAP_REPEATS)]
    return {
        "cap_gib": cap_gib,
        "large_tokens": served.count_tokens(large),
        "repeats": OVER_CAP_REPEATS,
        "over_cap_503": sum(row["large"] == (503, "out_of_memory") for row in rows),
        "next_200": sum(row["small"] == 200 for row in rows),
        "next_answer_same": sum(row["answers"] == first for row in rows),
        "refusal_ms": round(statistics.median(row["seconds"] for row in rows) * 1e3, 1),
        "reserved_mib_most": max(row["reserved_mib"] for row in rows),
        "before": before,
        "after": served.memory(),
        "rungs": served.recording.warmup["rungs"],
    }


def find_narrow_cap(options: Options) -> float:
    """A cap in GiB that the weights and a short call fit under, and a long one not."""
    weights = sum(
        path.stat().st_size for path in Path(options.make().path).glob("*.safetensors")
    )
    return round(weights / 2**30 + OVER_CAP_MIB / 1024, 3)


def _exceed(served: Served, large: Any, small: Any) -> dict[str, Any]:
    started = time.perf_counter()
    status, answer = served.ask("/v1/systemone", large)
    seconds = time.perf_counter() - started
    reserved = served.memory()["reserved_mib"] or 0
    after, again = served.ask("/v1/systemone", small)
    return {
        "large": (status, answer.get("error", {}).get("code")),
        "seconds": seconds,
        "reserved_mib": reserved,
        "small": after,
        "answers": again.get("answers"),
    }


def measure_kernels(options: Options) -> dict[str, Any]:
    """fla hidden: refused; with the switch: served, and said."""
    options.make()
    with tempfile.TemporaryDirectory() as folder:
        hidden = Path(folder) / "fla"
        hidden.mkdir()
        (hidden / "__init__.py").write_text("raise ImportError('hidden')\n")
        refused = _start(options, {"ALLOW_SLOW_KERNELS": "0"})
        refused_hidden = _start(options, {"ALLOW_SLOW_KERNELS": "0"}, hide=folder)
        return {
            "as_is_without_switch": _end(refused),
            "fla_hidden_without_switch": _end(refused_hidden),
            "fla_hidden_with_switch": _serve_slow(options, folder),
        }


def _serve_slow(options: Options, folder: str) -> dict[str, Any]:
    with _serving(_start(options, {"WARMUP_TOKENS": "512"}, hide=folder)) as server:
        url, log = server
        body = systemone(3, 150, 1)
        seconds = []
        for _ in range(20):
            started = time.perf_counter()
            status, answer = ask(url, "/v1/systemone", body)
            seconds.append(time.perf_counter() - started)
        return {
            "status": status,
            "tokens": answer["usage"]["input_tokens"],
            "median_ms": round(statistics.median(seconds) * 1000, 1),
            "kernels": ask(url, "/health")[1]["kernels"],
            "warned": "SLOW KERNELS ALLOWED" in log.read_text(),
        }


def measure_lost(options: Options) -> dict[str, Any]:
    """A device-side assert in a call: 503 at once, then exit status 70."""
    options.make()
    program = [sys.executable, str(Path(__file__)), str(options.directory)]
    program += [options.size, options.device]
    process = _start(options, {"WARMUP_TOKENS": "0"}, program=program)
    with _serving(process) as (url, log):
        small, large = systemone(1, 20, 1), systemone(2, 2000, 1)
        before = ask(url, "/v1/systemone", small)[0]
        started = time.perf_counter()
        posts = [("/v1/systemone", body) for body in (large, *[small] * 7)]
        out = run_client(url, TOKEN, posts, clients=8)["posts"]
        exit_status = process[0].wait(60)
        return {
            "before": before,
            "at_once": [
                (status, answer.get("error", {}).get("code"))
                for status, _, answer in out
            ],
            "exit_status": exit_status,
            "seconds_to_exit": round(time.perf_counter() - started, 2),
            "logged": "the engine is lost" in log.read_text(),
        }


Started = tuple[subprocess.Popen[bytes], Path]


def _start(
    options: Options,
    settings: dict[str, str],
    *,
    hide: str = "",
    program: list[str] | None = None,
) -> Started:
    """Start the demo command (or `program`) on the checkpoint; its output in a file."""
    log = Path(tempfile.mkstemp(suffix=".log")[1])
    path = [hide, str(ROOT), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, **options.environ(**settings)}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    command = [sys.executable, "-m", "intern_decision_serve", "demo", "--port", "0"]
    command += ["--dir", str(options.directory), "--size", options.size]
    with log.open("wb") as out:
        process = subprocess.Popen(
            program or command, env=environ, stdout=out, stderr=subprocess.STDOUT
        )
    return process, log


def _end(started: Started) -> dict[str, Any]:
    """Wait for a start that is expected to be refused."""
    process, log = started
    try:
        status: int | str = process.wait(START_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        status = "not refused"
    lines = log.read_text().strip().splitlines()
    return {"exit_status": status, "last_line": lines[-1] if lines else ""}


@contextmanager
def _serving(started: Started) -> Iterator[tuple[str, Path]]:
    """Wait until the process prints its URL; end it afterwards."""
    process, log = started
    deadline = time.monotonic() + START_SECONDS
    try:
        while not (found := re.search(r"(http://127[^\s]+)", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text()[-2000:])
            time.sleep(0.1)
        yield found[1], log
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _serve_with_assert(options: Options) -> int:
    """Serve as the demo does, but a call over 1,000 tokens indexes out of range."""
    from intern_decision_serve import cli, lifecycle

    load = lifecycle.load_on_this_thread

    def load_and_plant(config: Any, pins: Any) -> Any:
        engine = load(config, pins)
        torch, wrapped = engine._torch, engine._forward.wrapped

        def forward(**batch: Any) -> Any:
            ids = batch["input_ids"]
            if ids.shape[1] > 1000:
                far = torch.full((1,), 10**6, device=ids.device)
                if ids.is_cuda:
                    torch.zeros(8, device=ids.device)[far].cpu()
                raise RuntimeError("CUDA error: planted, this is no CUDA device")
            return wrapped(**batch)

        engine._forward.wrapped = forward
        return engine

    lifecycle.load_on_this_thread = load_and_plant
    directory = str(options.directory)
    return cli.main(["demo", "--dir", directory, "--size", options.size])


if __name__ == "__main__":
    assert TOKEN in os.environ["INTERN_DECISION_API_TOKEN"]
    sys.exit(_serve_with_assert(Options(Path(sys.argv[1]), *sys.argv[2:4])))
