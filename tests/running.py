"""The whole service in this process: the real server on port 0 over a FakeEngine."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from typing import Any

from fakes import WAIT, FakeEngine
from wire import TOKEN, Answer, Wire, until

from intern_decision_serve.config import load_config
from intern_decision_serve.lifecycle import Service
from intern_decision_serve.pins import FAMILY

__all__ = ["DECIDE", "OPTIONS", "PINS", "SYSTEMONE", "RunningService", "make_shared"]

PINS = FAMILY["Intern-Decision-4B"]
OPTIONS = [{"id": "a", "description": "one"}, {"id": "b", "description": "two"}]
DECIDE = {"id": "d", "state": "s", "question": "Which?", "options": OPTIONS}
SYSTEMONE = {"state": "s", "questions": {"ok": {"type": "noul", "instructions": "?"}}}


def make_shared(count: int) -> dict[str, Any]:
    """A /decide/shared body with so many decisions."""
    decision = {"question": "Which?", "options": OPTIONS}
    return {
        "state": "s",
        "decisions": [{"id": f"d{n}", **decision} for n in range(count)],
    }


class RunningService:
    """A service that answers; `stop` ends it and checks that nothing is left open."""

    def __init__(
        self, server_options: dict[str, Any], settings: dict[str, Any]
    ) -> None:
        environ = {"INTERN_DECISION_API_TOKEN": TOKEN, "INTERN_DECISION_PORT": "0"}
        config = dataclasses.replace(load_config(environ), **settings)
        self.lost = 0
        self.service = Service.build(
            config, PINS, self._load, on_lost=self._count_lost, **server_options
        )
        self.server = self.service.server
        self.worker = self.service.worker
        self.worker.start()
        assert self.worker.ready.wait(WAIT)
        self.engine: FakeEngine = self.worker.engine
        self.service.serve()
        self.address = self.server.server_address

    def _load(self) -> FakeEngine:
        return FakeEngine()

    def _count_lost(self) -> None:
        self.lost += 1

    def wire(self, **options: Any) -> Wire:
        """A new connection."""
        return Wire(self.address, **options)

    def post(self, path: str, body: bytes | object = b"", **options: Any) -> Answer:
        """One POST on a connection of its own."""
        with self.wire() as wire:
            return wire.post(path, body, **options)

    def get(self, path: str, **options: Any) -> Answer:
        """One GET on a connection of its own."""
        with self.wire() as wire:
            return wire.get(path, **options)

    @property
    def admitted(self) -> int:
        """Slots held now."""
        return self.service.admission.admitted

    @property
    def outcomes(self) -> dict[str, int]:
        """Finished requests, by outcome."""
        return self.service.access_log.outcomes

    def _close(self) -> None:
        """Close the service; a connection wakes its acceptor, for the tests' speed."""
        closing = threading.Thread(target=self.service.close)
        closing.start()
        while closing.is_alive():
            with contextlib.suppress(OSError):
                socket.create_connection(self.address[:2], timeout=1).close()
            closing.join(0.002)

    def stop(self) -> None:
        """Answer what is admitted, close everything, wait for every thread."""
        self.engine.gate.set()
        self.worker.stop()
        self._close()
        assert self.worker.join(WAIT)
        for sock in list(self.server._connections):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        until(lambda: self.server.open_connections == 0)
        assert self.admitted == 0
