"""Every route: what an admitted body becomes, and what the open documents hold.

    body -> parse_json -> rules -> calls -> Worker.submit -> wait -> result document

It must never touch a socket, a header or the engine's model: framing, bearer and slot
came before (`exchange`), scoring happens on the inference thread (`worker`).
"""

from __future__ import annotations

import importlib.resources
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import mapping, systemone, validation
from .config import Config
from .errors import InvalidRequest, ScoringFailed, ServiceError
from .health import Health
from .jobs import ClientGone, Job, Result
from .metrics import CONTENT_TYPE, Metrics
from .pins import READOUT, ModelPins
from .worker import Worker

__all__ = ["Api", "Reply", "Trace"]

JSON = "application/json"
UNBOUNDED_BODY_BYTES = 4096  # no body of so little renders past any limit
LONG_BODY_BYTES = 8192  # encoding ahead gains nothing below some 3,000 tokens
VALUES_A_TOKEN = 4  # more JSON values than 4 x MAX_TOKENS cannot fit a call


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished answer before it is framed."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()
    code: str = ""

    @classmethod
    def document(cls, status: int, document: object, **rest: Any) -> Reply:
        """A JSON reply; what cannot be written as JSON is ScoringFailed (INV-1)."""
        try:
            body = json.dumps(
                document, ensure_ascii=False, allow_nan=False, separators=(",", ":")
            ).encode()
        except (TypeError, ValueError):  # a non-finite number, a lone surrogate
            raise ScoringFailed("the answer cannot be written as JSON") from None
        return cls(status, body, **rest)


@dataclass(slots=True)
class Trace:
    """What scoring tells the access line; seconds."""

    queued_seconds: float = 0.0
    scoring_seconds: float = 0.0
    calls: int = 0
    input_tokens: int = 0


PostHandler = Callable[[bytes, Callable[[], bool], Trace], Reply]


class Api:
    """The routes over one worker; its methods run on handler threads."""

    def __init__(
        self,
        config: Config,
        pins: ModelPins,
        worker: Worker,
        health: Health,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._pins = pins
        self._worker = worker
        self._health = health
        self._metrics = metrics
        self._max_values = VALUES_A_TOKEN * config.max_tokens
        self._openapi = _read_openapi()
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self.posts: dict[str, PostHandler] = {
            "/decide": self.decide,
            "/decide/shared": self.decide_shared,
            "/v1/systemone": self.systemone,
        }
        self.open_gets: dict[str, Callable[[], Reply]] = {
            "/health": self.health,
            "/openapi.json": self.openapi,
        }
        self.gets: dict[str, Callable[[], Reply]] = {
            "/metrics": self.metrics,
            "/v1/models": self.models,
        }

    def allow(self, path: str) -> str | None:
        """The methods a path takes, as the Allow header lists them; None if unknown."""
        if path in self.posts:
            return "POST"
        return "GET, HEAD" if path in self.open_gets or path in self.gets else None

    def decide(self, body: bytes, is_gone: Callable[[], bool], trace: Trace) -> Reply:
        """POST /decide: one decision, one call per ordering."""
        parse, build = validation.parse_decide, mapping.build_decide
        return self._map(body, is_gone, trace, parse, build)

    def decide_shared(
        self, body: bytes, is_gone: Callable[[], bool], trace: Trace
    ) -> Reply:
        """POST /decide/shared: many decisions over one state, packed into calls."""
        parse, build = validation.parse_shared, mapping.build_shared
        return self._map(body, is_gone, trace, parse, build)

    def _map(
        self,
        body: bytes,
        is_gone: Callable[[], bool],
        trace: Trace,
        parse: Callable[..., Any],
        build: Callable[..., dict[str, Any]],
    ) -> Reply:
        """Map a semif-shaped body onto calls, and their answers back."""
        with self._turn(body, is_gone):
            limit = self._config.max_decisions
            request = parse(self._parse(body), max_decisions=limit)
            calls = mapping.plan_calls(request.state, request.decisions)
            requests = self._check_fit(body, [call.request for call in calls])
        result = self._score(body, requests, is_gone, trace)
        seconds = result.scoring_seconds
        return Reply.document(
            200, build(request, calls, result.scored, self._labels, seconds)
        )

    def systemone(
        self, body: bytes, is_gone: Callable[[], bool], trace: Trace
    ) -> Reply:
        """POST /v1/systemone: straight to predict(), never through the mapping."""
        with self._turn(body, is_gone):
            request = validation.parse_systemone(self._parse(body))
            engine_request = systemone.engine_request(request)
            requests = self._check_fit(body, [engine_request])
            self._worker.engine.validate(engine_request)
        result = self._score(body, requests, is_gone, trace)
        response, _ = result.scored[0]
        return Reply.document(
            200, systemone.build_answer(request, response, self._pins.served_as)
        )

    def health(self) -> Reply:
        """GET /health: 200 while requests are served, 503 otherwise."""
        document = self._health.document()
        return Reply.document(200 if document["status"] == "ok" else 503, document)

    def models(self) -> Reply:
        """GET /v1/models, as the official SDK reads it."""
        name = self._pins.served_as
        entries = [
            ("jev-latest", f"The Jev clients' alias of {name}"),
            (name, f"{self._pins.source}, temperature-scaled, text only"),
        ]
        listed = [
            {"name": name, "description": text, "release_date": "2026-09-30"}
            for name, text in entries
        ]
        return Reply.document(200, {"models": listed})

    def metrics(self) -> Reply:
        """GET /metrics: what Prometheus scrapes; served while stopping, too."""
        return Reply(200, self._metrics.render(), CONTENT_TYPE)

    def openapi(self) -> Reply:
        """GET /openapi.json: the document that ships in the package."""
        return Reply(200, self._openapi)

    @property
    def _labels(self) -> dict[str, Any]:
        return {
            "model": self._worker.engine.description,
            "prompt_version": self._pins.prompt_version,
            "readout": READOUT,
            "probability_status": self._pins.probability_status,
        }

    @contextmanager
    def _turn(self, body: bytes, is_gone: Callable[[], bool]) -> Iterator[None]:
        """The turn this body's Python needs; a client may be gone when it comes."""
        with self._worker.turns.prepare(len(body)):
            if is_gone():
                self._worker.count_skipped()
                raise ClientGone
            yield

    def _parse(self, body: bytes) -> object:
        return validation.parse_json(body, max_values=self._max_values)

    def _check_fit(
        self, body: bytes, requests: list[dict[str, Any]]
    ) -> tuple[dict[str, Any], ...]:
        """Refuse a call that cannot fit MAX_TOKENS before any of it is rendered."""
        if len(body) <= UNBOUNDED_BODY_BYTES:
            return tuple(requests)
        most = self._config.max_tokens * self._worker.engine.longest_token
        for request in requests:
            if validation.rendered_size(request) > most:
                raise InvalidRequest(
                    f"the prompt cannot fit MAX_TOKENS ({self._config.max_tokens})"
                )
        return tuple(requests)

    def _encode_ahead(
        self, body: bytes, requests: tuple[dict[str, Any], ...]
    ) -> list[Future[Any]]:
        """Start the CPU part of long calls on the encoder thread; none for short ones.

        The first is waited for, the rest run while the calls before them are scored.
        """
        if len(body) < LONG_BODY_BYTES:
            return []
        # Without a turn: tokenising releases the GIL, and under the lock of the light
        # ones a legal MiB kept every small request waiting for seconds.
        prepare = self._worker.engine.prepare
        return [self._encoder.submit(prepare, request) for request in requests]

    def _score(
        self,
        body: bytes,
        requests: tuple[dict[str, Any], ...],
        is_gone: Callable[[], bool],
        trace: Trace,
    ) -> Result:
        ahead = self._encode_ahead(body, requests)
        job = Job(requests, is_gone, tuple(partial(_take, future) for future in ahead))
        try:
            if ahead:
                ahead[0].result()  # an over-long prompt is refused before it waits
            self._worker.submit(job)
            result = job.wait()
        except ServiceError:
            trace.queued_seconds = time.monotonic() - job.submitted_at
            raise
        finally:
            for future in ahead:
                future.cancel()
        trace.queued_seconds = result.queued_seconds
        trace.scoring_seconds = result.scoring_seconds
        trace.calls = len(result.scored)
        trace.input_tokens = sum(
            response["usage"].get("input_tokens", 0)
            for response, _ in result.scored
            if isinstance(response.get("usage"), dict)
        )
        return result


def _take(future: Future[Any]) -> Any:
    """What was prepared; None where it was not begun: predict() then encodes itself."""
    return None if future.cancel() else future.result()


def _read_openapi() -> bytes:
    package = importlib.resources.files("intern_decision_serve")
    return package.joinpath("openapi.json").read_bytes()
