"""The `/health` document: the contract's fields first, then what an operator asks next.

Read from settings, pins and what the inference thread left behind. Handler threads call
it: it must never touch torch, and it answers while a call is blocked.
"""

from __future__ import annotations

import time
from typing import Any

from . import __version__
from .accesslog import AccessLog
from .admission import Admission
from .config import Config
from .pins import CHUNKING, MAX_QUESTIONS_PER_CALL
from .worker import Worker

__all__ = ["ENDPOINTS", "Health"]

ENDPOINTS = ("/decide", "/decide/shared", "/v1/systemone")


class Health:
    """Builds the document; safe from any thread once the engine is loaded."""

    def __init__(
        self, config: Config, worker: Worker, admission: Admission, log: AccessLog
    ) -> None:
        self._config = config
        self._worker = worker
        self._admission = admission
        self._log = log
        self._started_at = time.monotonic()

    def document(self) -> dict[str, Any]:
        """`status` is ok, stopping or engine_failed; all else is always there."""
        config, engine = self._config, self._worker.engine
        return {
            "status": self.status,
            "model": engine.description,
            "vram_cap_gib": config.vram_cap_gib,
            "max_tokens": config.max_tokens,
            "max_decisions": config.max_decisions,
            "max_questions_per_call": MAX_QUESTIONS_PER_CALL,
            "chunking": CHUNKING,
            "workloads": [],
            "endpoints": list(ENDPOINTS),
            "systemone": {
                "max_questions": MAX_QUESTIONS_PER_CALL,
                "chunking": "none",
                "images": "not supported",
                "max_tokens": config.max_tokens,
            },
            "version": __version__,
            "accepting": self.is_accepting,
            "limits": {
                "max_queue": config.max_queue,
                "max_body_bytes": config.max_body_bytes,
            },
            "queue": self._queue(),
            "memory": self._worker.memory,
            "kernels": engine.kernels,
            "warmup": engine.warmup,
            "cuda_graphs": engine.graphs,
            "requests": self._log.outcomes | {"skipped": self._worker.skipped},
            "uptime_seconds": round(time.monotonic() - self._started_at, 1),
        }

    @property
    def status(self) -> str:
        """What the service is doing, in one word."""
        if self._worker.is_lost:
            return "engine_failed"
        return "stopping" if self._worker.is_stopping else "ok"

    @property
    def is_accepting(self) -> bool:
        """Whether a POST sent now would be admitted; what a balancer reads."""
        free = self._admission.admitted < self._admission.max_queue
        return self.status == "ok" and free

    def _queue(self) -> dict[str, Any]:
        worker, admission = self._worker, self._admission
        median, success = worker.median_call_seconds, worker.last_success_at
        running = worker.running_seconds
        return {
            "admitted": admission.admitted,
            "scoring": worker.is_scoring,
            "slots_free": admission.max_queue - admission.admitted,
            "running_seconds": None if running is None else round(running, 3),
            "median_call_ms": None if median is None else round(median * 1000, 1),
            "calls": worker.calls,
            "seconds_since_success": (
                None if success is None else round(time.monotonic() - success, 1)
            ),
        }
