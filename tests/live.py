"""The whole service in this process, on a fake engine and a real socket."""

from __future__ import annotations

import http.client
import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fakes import fake_predict

from intern_decision_serve.config import load_config
from intern_decision_serve.errors import InvalidRequest
from intern_decision_serve.lifecycle import Service
from intern_decision_serve.pins import FAMILY

__all__ = ["TOKEN", "LiveEngine", "LiveService", "serve"]

TOKEN = "live-token-of-at-least-32-characters"
MAX_OPTIONS = 62
_SHAPES: dict[str, tuple[type, ...]] = {"choice": (dict,), "score": (list, dict)}
_MODEL_FIELDS = (
    "source revision dtype device torch_version transformers_version serving_config "
    "name inference_sha256 chat_template_sha256"
).split()


class LiveEngine:
    """Answers from a hash of each question; refuses the shapes the model refuses.

    `gate` is open; a test that clears it holds the inference thread inside a call.
    """

    longest_token = 16
    graphs = None

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.description: dict[str, Any] = dict.fromkeys(_MODEL_FIELDS, "fake")
        self.kernels: dict[str, Any] = {}
        self.warmup: dict[str, Any] = {}
        self.gate = threading.Event()
        self.gate.set()

    def score(
        self, request: dict[str, Any], prepared: Any = None
    ) -> tuple[dict[str, Any], str]:
        """predict()'s shapes, and a hash of the right length."""
        self.gate.wait()
        if self.seconds:
            time.sleep(self.seconds)
        response = fake_predict(request)
        for answer in response["answers"].values():
            if "legend" in answer:  # the model's is text throughout, and never null
                answer["legend"] = {k: str(v) for k, v in answer["legend"].items()}
        return response, "0" * 64

    def validate(self, request: dict[str, Any]) -> None:
        """The pinned validate_request's rules on each question."""
        for name, question in request["questions"].items():
            kind, criteria = question["type"], question.get("criteria")
            if kind == "noul":
                continue
            if not isinstance(criteria, _SHAPES[kind]):
                raise InvalidRequest(f"{name!r}: {kind} criteria have another shape")
            if not 1 <= len(criteria) <= MAX_OPTIONS:
                raise InvalidRequest(f"{name!r}: {len(criteria)} options, not 1 to 62")
            if kind == "score" and isinstance(criteria, dict):
                _check_numbers(criteria)

    def prepare(self, request: dict[str, Any]) -> None:
        """Nothing is encoded ahead."""

    def memory(self) -> dict[str, float | None]:
        """No card."""
        return dict.fromkeys(
            ("baseline_mib", "allocated_mib", "reserved_mib", "peak_mib")
        )


def _check_numbers(criteria: dict[str, Any]) -> None:
    for value in criteria:
        try:
            finite = math.isfinite(float(value))
        except ValueError:
            finite = False
        if not finite:
            raise InvalidRequest("score values must be finite numbers")


class LiveService:
    """A running service; `engine` is its fake, `ask` a client of one request."""

    def __init__(self, service: Service, engine: LiveEngine) -> None:
        self.service = service
        self.engine = engine
        self.url = service.server.url
        self.token = TOKEN

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.service.server.server_address[:2]
        return str(host), int(port)

    def count(self, outcome: str, at_least: int) -> int:
        """How many requests ended so; they are counted just after their answer."""
        deadline = time.monotonic() + 10
        while (found := self.service.access_log.outcomes.get(outcome, 0)) < at_least:
            assert time.monotonic() < deadline, (outcome, found)
            time.sleep(0.002)
        return found

    def ask(
        self,
        path: str,
        body: object = None,
        *,
        method: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """One request on a new connection: status, JSON answer, headers."""
        connection = http.client.HTTPConnection(*self.address, timeout=30)
        given = {"Authorization": f"Bearer {TOKEN}"} if headers is None else headers
        data = json.dumps(body).encode() if body is not None else None
        try:
            connection.request(
                method or ("GET" if body is None else "POST"), path, data, given
            )
            response = connection.getresponse()
            content = response.read()
            is_json = response.headers.get("Content-Type") == "application/json"
            document = json.loads(content) if is_json and content else content
            return response.status, document, response.headers
        finally:
            connection.close()


@contextmanager
def serve(seconds: float = 0.0, **settings: str) -> Iterator[LiveService]:
    """Run the service, `seconds` a call, settings by their short names; ends it."""
    given = {"API_TOKEN": TOKEN, "PORT": "0", "DEVICE": "cpu", **settings}
    config = load_config({f"INTERN_DECISION_{k}": v for k, v in given.items()})
    engine = LiveEngine(seconds)
    service = Service.build(config, FAMILY["Intern-Decision-4B"], lambda: engine)
    service.worker.start()
    service.worker.ready.wait()
    service.serve()
    try:
        yield LiveService(service, engine)
    finally:
        engine.gate.set()
        service.worker.stop()
        service.close()
        assert service.worker.join(10)
