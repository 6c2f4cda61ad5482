"""The real service in this process, with a hand on its inference thread."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from intern_decision_serve.cli import OFFLINE
from intern_decision_serve.config import load_config
from intern_decision_serve.demo import DemoCheckpoint, make_checkpoint
from intern_decision_serve.jobs import Job
from intern_decision_serve.lifecycle import Service, load_on_this_thread
from intern_decision_serve.warmup import find_difference

TOKEN = "measured-token-of-at-least-32-characters"


@dataclasses.dataclass(frozen=True)
class Options:
    """Where the checkpoint is, and what it is measured on."""

    directory: Path
    size: str = "4b"
    device: str = "cuda"

    def make(self) -> DemoCheckpoint:
        """Make the checkpoint, or find the one that is there."""
        return make_checkpoint(self.directory, size=self.size, device=self.device)

    def environ(self, **settings: str) -> dict[str, str]:
        """Settings for a server on this checkpoint; slow kernels are allowed there."""
        ours = {
            "API_TOKEN": TOKEN,
            "DEVICE": self.device,
            "PORT": "0",
            "ALLOW_SLOW_KERNELS": "1",
            **settings,
        }
        return {f"INTERN_DECISION_{name}": value for name, value in ours.items()}


class Recording:
    """The engine, recording threads and direct predict() answers beside its own."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.threads: set[int] = set()
        self.is_checking = False
        self.direct: dict[str, Any] = {}
        self.differences: list[str] = []
        self.checked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def score(self, request: dict[str, Any], prepared: Any = None) -> tuple[Any, str]:
        """Score, or run what `Served.on_inference_thread` sent."""
        self.threads.add(threading.get_ident())
        if "run" in request:
            return {"result": request["run"](self.engine), "usage": {}}, ""
        scored = self.engine.score(request, prepared)
        if self.is_checking:
            self._check(request, scored)
        return scored

    def _check(self, request: dict[str, Any], scored: tuple[Any, str]) -> None:
        direct = self.engine._decision_engine.predict(request)
        again, again_hash = self.engine.score(request)
        for other in (direct, again):
            difference = find_difference(other, scored[0])
            if difference is not None:
                self.differences.append(difference)
        if again_hash != scored[1]:
            self.differences.append("prompt_sha256")
        self.direct[json.dumps(request)] = direct
        self.checked += 1


class Served:
    """A `Service` that answers on a free port; `recording` is its engine."""

    def __init__(self, options: Options, **settings: str) -> None:
        os.environ.update(OFFLINE)
        checkpoint = options.make()
        config = load_config({**os.environ, **options.environ(**settings)})
        config = dataclasses.replace(config, checkpoint=checkpoint.path)
        pins = checkpoint.pins
        self.service = Service.build(
            config, pins, lambda: Recording(load_on_this_thread(config, pins))
        )
        worker = self.service.worker
        worker.start()
        worker.ready.wait()
        if worker.failure is not None:
            raise worker.failure
        self.recording: Recording = worker.engine
        self.service.serve()
        self.url = self.service.server.url
        self.token = TOKEN

    def on_inference_thread(self, function: Callable[[Any], Any]) -> Any:
        """Run `function(engine)` where every call runs; return its result."""
        job = Job(({"run": function},), lambda: False)
        self.service.worker.submit(job)
        return job.wait().scored[0][0]["result"]

    def count_tokens(self, body: dict[str, Any]) -> int:
        """Count the tokens of a /v1/systemone body."""
        request = {"state": body["state"], "questions": body["questions"]}
        count: int = self.on_inference_thread(lambda e: e._count_tokens(request))
        return count

    def memory(self) -> dict[str, Any]:
        """Driver and allocator figures in MiB, read now."""
        read = self.on_inference_thread(lambda engine: engine.memory())
        return {**read, "driver_mib": driver_mib()}

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """One request on a connection of its own."""
        return ask(self.url, path, body)


def ask(url: str, path: str, body: Any = None) -> tuple[int, Any]:
    """One GET, or POST with the token: status and JSON answer."""
    connection = http.client.HTTPConnection(url.partition("//")[2], timeout=300)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def driver_mib() -> int | None:
    """What the driver says is used on the first card; None without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return int(text.split()[0])
