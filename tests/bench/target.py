"""The server under load, as a process that is told over stdin what to measure.

    {"bare": s}    loop predict() alone on the inference thread for s seconds
    {"begin": 0}   forget what was measured
    {"end": 0}     tell the predict() calls since then

It is the real server on the real loader (`--engine demo`), or on an engine of a known
duration. It prints its URL first, then one JSON line per command.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from intern_decision_serve.config import Config, load_config
from intern_decision_serve.jobs import Job
from intern_decision_serve.lifecycle import Service, load_on_this_thread
from intern_decision_serve.pins import FAMILY, ModelPins

from .client import TOKEN
from .requests import PROMPTS, STREAM_FIELDS

__all__ = ["ClockEngine", "configure_logging", "main"]


class ClockEngine:
    """Answers one choice question the same way each time, after `seconds`."""

    longest_token = 64
    graphs = None

    def __init__(self, seconds: float) -> None:
        self.description: dict[str, Any] = {"name": "clock"}
        self.kernels: dict[str, Any] = {}
        self.warmup: dict[str, Any] = {}
        self._seconds = seconds
        probabilities = {"allow": 0.25, "ask": 0.5, "deny": 0.25}
        answer = {
            "type": "choice",
            "choice": "ask",
            "probabilities": probabilities,
            "confidence": 0.5,
            "source": "local",
            "decision": "ask",
        }
        self._response = {
            "answers": {"q": answer},
            "usage": {"input_tokens": 200, "output_tokens": 1, "decision_count": 1},
            "timing": {"inference_ms": 1.0},
            "calibration": {"method": "temperature-scaling", "temperature": 1.5},
            "model": "clock",
            "backend": "hf",
        }

    def predict(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer, after the time a call takes."""
        if self._seconds:
            time.sleep(self._seconds)
        return self._response

    def score(self, request: dict[str, Any], prepared: Any = None) -> Any:
        """As the engine's: the answer and a hash."""
        return self.predict(request), "0" * 64

    def validate(self, request: dict[str, Any]) -> None:
        """Nothing to refuse."""

    def prepare(self, request: dict[str, Any]) -> None:
        """Nothing to prepare."""

    def memory(self) -> dict[str, Any]:
        """No card."""
        return {}


def _clock(thread: int) -> float:
    """Seconds, without those a thread of ours waited for a core that others had.

    A shared machine's other work would else double a latency at random. What the
    interpreter's lock costs stays in: its waiter sleeps, it does not wait for a core.
    """
    now = time.perf_counter()
    try:
        waited = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]
    except (OSError, IndexError):
        return now
    return now - int(waited) / 1e9


class Measured:
    """An engine whose predict() calls are timed, and which can loop them alone."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._owner = getattr(engine, "_decision_engine", engine)
        self._predict = self._owner.predict
        self._owner.predict = self._timed
        self.seconds: list[float] = []
        self.calls = 0
        self.began_at = 0.0
        self.thread = threading.get_native_id()  # it is made on the inference thread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _timed(self, request: dict[str, Any]) -> Any:
        started = _clock(self.thread)
        try:
            return self._predict(request)
        finally:
            self.calls += 1
            if request["questions"].keys() == STREAM_FIELDS:
                self.seconds.append(_clock(self.thread) - started)

    def score(self, request: dict[str, Any], prepared: Any = None) -> Any:
        """The engine's own, or the bare loop that a command asked for."""
        if "bare" not in request:
            return self._engine.score(request, prepared)
        self.seconds.clear()
        self.calls = 0
        requests = [PROMPTS[request["prompts"]](i) for i in range(8)]
        self.began_at = _clock(self.thread)  # what was queued before is over
        until, turn = time.perf_counter() + request["bare"], 0
        while time.perf_counter() < until:
            self._timed(requests[turn % len(requests)])
            turn += 1
        return {}, ""


def configure_logging() -> None:
    """As the service does: lines to stderr, which the bench sends to a file."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="time=%(asctime)s.%(msecs)03dZ level=%(levelname)s %(message)s",
    )


def _say(document: object) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def _engine_source(options: argparse.Namespace) -> tuple[Config, ModelPins, Any]:
    environ = {
        "INTERN_DECISION_PORT": "0",
        "INTERN_DECISION_API_TOKEN": TOKEN,
        "INTERN_DECISION_DEVICE": options.device,
        "INTERN_DECISION_MAX_QUEUE": str(options.max_queue),
        **{k: v for k, v in os.environ.items() if k.startswith("INTERN_DECISION_")},
    }
    config = load_config(environ)
    if options.engine != "demo":
        seconds = float(options.engine)
        return config, FAMILY["Intern-Decision-4B"], lambda: ClockEngine(seconds)
    from intern_decision_serve.demo import make_checkpoint

    if options.device != "cpu":  # nothing of this process may meet the card before load
        maker = [sys.executable, "-m", "intern_decision_serve.demo"]
        subprocess.run([*maker, options.dir, options.size, options.device], check=True)
    made = make_checkpoint(Path(options.dir), size=options.size)
    config = dataclasses.replace(config, checkpoint=made.path)
    return config, made.pins, lambda: load_on_this_thread(config, made.pins)


def main() -> None:
    """Serve, and obey stdin until it ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="0", help="seconds a call takes, or demo")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dir", default="")
    parser.add_argument("--max-queue", type=int, default=32)
    options = parser.parse_args()
    configure_logging()
    config, pins, load = _engine_source(options)
    service = Service.build(config, pins, lambda: Measured(load()))
    service.worker.start()
    service.worker.ready.wait()
    if service.worker.failure is not None:
        raise service.worker.failure
    service.serve()
    _say({"url": service.server.url})
    for line in sys.stdin:
        _say(_obey(json.loads(line), service))


def _obey(command: dict[str, Any], service: Service) -> dict[str, Any]:
    measured: Measured = service.worker.engine
    if "begin" in command:
        measured.seconds.clear()
        measured.calls = 0
        measured.began_at = _clock(measured.thread)
        return {}
    if "bare" in command:
        job = Job((command,), lambda: False)
        service.worker.submit(job)
        job.wait()
    seconds = list(measured.seconds)
    elapsed = _clock(measured.thread) - measured.began_at
    return {
        "other_calls": measured.calls - len(seconds),
        "median_ms": statistics.median(seconds) * 1000 if seconds else None,
        "calls_a_second": len(seconds) / elapsed,
    }


if __name__ == "__main__":
    main()
