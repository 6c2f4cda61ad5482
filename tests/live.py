"""A running service that refuses what the model refuses, for clients of its own.

It stands where real clients, generated requests and soaks need the model's own rules
and a complete `/health`; tests of single rules take `running.RunningService`.
"""

from __future__ import annotations

import http.client
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fakes import WAIT, FakeEngine
from running import RunningService
from wire import TOKEN, until

from intern_decision_serve.errors import InvalidRequest

__all__ = ["LiveEngine", "LiveService", "serve"]

MAX_OPTIONS = 62
_SHAPES: dict[str, tuple[type, ...]] = {"choice": (dict,), "score": (list, dict)}
_MODEL_FIELDS = (
    "source revision dtype device torch_version transformers_version serving_config "
    "name inference_sha256 chat_template_sha256"
).split()


class LiveEngine(FakeEngine):
    """Takes `seconds` a call and refuses the shapes that the model refuses."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.description = dict.fromkeys(_MODEL_FIELDS, "fake")

    def score(
        self, request: dict[str, Any], prepared: Any = None
    ) -> tuple[dict[str, Any], str]:
        """predict()'s shapes; nothing is kept, so that a soak may look for growth."""
        if self.seconds:
            time.sleep(self.seconds)
        response, prompt_sha256 = super().score(request, prepared)
        self.records.clear()
        for answer in response["answers"].values():
            if "legend" in answer:  # the model's is text throughout, and never null
                answer["legend"] = {k: str(v) for k, v in answer["legend"].items()}
        return response, prompt_sha256

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


def _check_numbers(criteria: dict[str, Any]) -> None:
    for value in criteria:
        try:
            finite = math.isfinite(float(value))
        except ValueError:
            finite = False
        if not finite:
            raise InvalidRequest("score values must be finite numbers")


class LiveService(RunningService):
    """A running service; `ask` is a client of one request."""

    def __init__(self, seconds: float, settings: dict[str, Any]) -> None:
        self._seconds = seconds
        super().__init__({}, settings)
        self.url = self.server.url
        self.token = TOKEN

    def _load(self) -> FakeEngine:
        return LiveEngine(self._seconds)

    def count(self, outcome: str, at_least: int) -> int:
        """How many requests ended so; they are counted just after their answer."""
        until(lambda: self.outcomes.get(outcome, 0) >= at_least)
        return self.outcomes[outcome]

    def ask(
        self,
        path: str,
        body: object = None,
        *,
        method: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """One request on a new connection: status, JSON answer, headers."""
        connection = http.client.HTTPConnection(*self.address[:2], timeout=WAIT)
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
def serve(seconds: float = 0.0, **settings: Any) -> Iterator[LiveService]:
    """Run the service, `seconds` a call, settings by their `Config` names; ends it."""
    live = LiveService(seconds, settings)
    try:
        yield live
    finally:
        live.stop()
