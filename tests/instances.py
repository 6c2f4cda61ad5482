"""An instance whose engine only sleeps, as a process: it starts seconds sooner.

    python instances.py SECONDS_A_CALL [--stay-lost]

A call over the state "hold" runs until SIGUSR2. From SIGUSR1 on every call loses the
engine; the process then exits as the real one does, unless it is told to stay. From
SIGHUP on every call fails.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from demo_server import TOKEN, DemoServer, make_environ
from fakes import fake_predict

from intern_decision_serve import lifecycle
from intern_decision_serve.config import load_config
from intern_decision_serve.errors import EngineFailed

__all__ = ["BREAK", "HOLD", "LOSE", "RELEASE", "SleepingEngine", "start_instance"]

HOLD = "hold"
LOSE, RELEASE, BREAK = signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP


class SleepingEngine:
    """Answers with numbers from a hash after `seconds`; waits and fails when told."""

    description = {
        "name": "Intern-Decision-4B",
        "revision": "0" * 40,
        "device": "none",
        "torch_version": "none",
        "transformers_version": None,
    }
    kernels = {
        "causal_conv1d_fn": {
            "implementation": "causal_conv1d.interface.causal_conv1d_fn",
            "package": "causal-conv1d",
            "version": "1.7.0",
            "fast": True,
        }
    }
    warmup: dict[str, Any] = {}
    graphs = None
    longest_token = 100

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.is_lost = False
        self.is_broken = False
        self.release = threading.Event()

    def score(self, request: Any, prepared: Any = None) -> tuple[dict[str, Any], str]:
        if self.is_lost:
            raise EngineFailed("the engine is lost")
        if self.is_broken:
            raise RuntimeError("broken")
        if request["state"] == HOLD:
            self.release.wait()
        time.sleep(self.seconds)
        return fake_predict(request), "0" * 64

    def validate(self, request: Any) -> None:
        pass

    def prepare(self, request: Any) -> None:
        return None

    def memory(self) -> dict[str, float]:
        return {
            "baseline_mib": 1.0,
            "allocated_mib": 2.0,
            "reserved_mib": 3.0,
            "peak_mib": 4.0,
        }


def start_instance(
    logs: Path, seconds: float = 0.0, *, stay_lost: bool = False, **settings: str
) -> DemoServer:
    """Start one on a free port; it is not ready yet."""
    logs.mkdir(parents=True)
    log, out = logs / "stderr", logs / "stdout"
    arguments = [str(seconds), *(["--stay-lost"] if stay_lost else [])]
    with log.open("wb") as stderr, out.open("wb") as stdout:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), *arguments],
            env=make_environ(API_TOKEN=TOKEN, **{"PORT": "0", **settings}),
            stdout=stdout,
            stderr=stderr,
        )
    return DemoServer(process, log, out)


def _main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float)
    parser.add_argument("--stay-lost", action="store_true")
    options = parser.parse_args()
    engine = SleepingEngine(options.seconds)

    def lose(*_: object) -> None:
        engine.is_lost = True

    def break_(*_: object) -> None:
        engine.is_broken = True

    signal.signal(LOSE, lose)
    signal.signal(BREAK, break_)
    signal.signal(RELEASE, lambda *_: engine.release.set())
    lifecycle.load_on_this_thread = lambda config, pins: engine
    if options.stay_lost:
        lifecycle._end_lost = lambda service: threading.Event().wait()  # type: ignore
    config = load_config(os.environ)
    return lifecycle.run(config, config.pins, _say)


def _say(url: str) -> None:
    sys.stdout.write(url + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    os._exit(_main())
