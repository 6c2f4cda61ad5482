"""A soak: clients of every kind at once, and nothing grows.

    python tests/soak.py [--seconds 60] [--clients 32]

The service runs on the fake engine in this process; so do its clients. Threads, file
descriptors, slots and memory are compared between two quiet moments: after a first
part that warms everything up, and at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakes import fake_predict
from live import LiveService, serve
from wire import TOKEN

__all__ = ["Footprint", "Outcome", "soak"]

QUIET_SECONDS = 20.0
OPTIONS = [{"id": "a", "description": "first"}, {"id": "b", "description": "second"}]
LIMIT = 64 * 1024
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the process holds in a quiet moment."""

    threads: int
    descriptors: int
    admitted: int
    connections: int
    resident_mib: float


@dataclass(slots=True)
class Outcome:
    """What the clients met, and the footprints before and after."""

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    before: Footprint | None = None
    after: Footprint | None = None

    def to_json(self) -> str:
        """One line for people and machines."""
        told = {
            "answers": dict(sorted(self.answers.items())),
            "wrong": self.wrong,
            "before": str(self.before),
            "after": str(self.after),
        }
        return json.dumps(told)


class SoakClient:
    """One client's thread: requests of all kinds in random order."""

    def __init__(self, live: LiveService, outcome: Outcome, seed: int) -> None:
        self._live = live
        self._outcome = outcome
        self._random = random.Random(seed)
        self._sock: socket.socket | None = None
        self._kinds: list[tuple[str, Callable[[], str]]] = [
            ("good", self._good),
            ("good", self._good),
            ("good", self._good),
            ("slow", self._slow),
            ("bad", self._bad),
            ("vanishing", self._vanish),
            ("oversized", self._oversize),
        ]

    def run(self, until: float) -> None:
        """Send until then; anything unexpected is noted, not raised."""
        while time.monotonic() < until:
            name, send = self._random.choice(self._kinds)
            try:
                told = send()
            except Exception as error:
                self._outcome.wrong.append(f"{name}: {type(error).__name__}: {error}")
                self._close()
            else:
                self._outcome.answers[f"{name} {told}"] += 1
        self._close()

    def _connect(self) -> socket.socket:
        if self._sock is None:
            self._sock = socket.create_connection(self._live.address, timeout=30)
        return self._sock

    def _close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _receive(self, sock: socket.socket) -> tuple[int, Any]:
        """One whole answer; closes the connection when the answer says so."""
        received = b""
        while b"\r\n\r\n" not in received:
            received += _more(sock)
        head, _, body = received.partition(b"\r\n\r\n")
        headers = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
        while len(body) < int(headers[b"Content-Length"]):
            body += _more(sock)
        if headers[b"Connection"] == b"close":
            self._close()
        return int(head[9:12]), json.loads(body)

    def _good(self) -> str:
        """A request that must be answered right, sooner or later."""
        path, body, check = self._random.choice([_decide, _shared, _systemone])(
            self._random.randrange(1000)
        )
        while True:
            sock = self._connect()
            sock.sendall(_post(path, body))
            status, answer = self._receive(sock)
            if status != 429:
                break
            self._outcome.answers["good 429, again"] += 1
            time.sleep(0.02)
        if status != 200 or not check(answer):
            raise AssertionError(f"{path} got {status} {str(answer)[:200]}")
        return "200"

    def _slow(self) -> str:
        """A good request in drips: it is answered like any other."""
        path, body, check = _systemone(self._random.randrange(1000))
        data = _post(path, body)
        sock = self._connect()
        step = len(data) // 8 + 1
        for i in range(0, len(data), step):
            sock.sendall(data[i : i + step])
            time.sleep(0.01)
        status, answer = self._receive(sock)
        if status not in (200, 429) or (status == 200 and not check(answer)):
            raise AssertionError(f"{status} {str(answer)[:200]}")
        return str(status)

    def _bad(self) -> str:
        """Something to refuse, with the one status it must get (or 429)."""
        expected, data = self._random.choice(
            [
                (401, _post("/decide", b"{}", token="wrong")),
                (404, _post("/nowhere", b"{}")),
                (405, b"PUT /decide HTTP/1.1\r\nHost: h\r\n\r\n"),
                (422, _post("/decide", b'{"state": NaN}')),
                (422, _post("/v1/systemone", b"[" * 2000)),
                (415, _post("/decide", b"x", extra="Content-Encoding: br\r\n")),
                (400, b"POST /decide\r\nHost: h\r\n\r\n"),
                (505, b"GET /health HTTP/2.0\r\nHost: h\r\n\r\n"),
            ]
        )
        sock = self._connect()
        sock.sendall(data)
        status, answer = self._receive(sock)
        if status not in (expected, 429) or answer["error"].keys() != _ENVELOPE:
            raise AssertionError(f"{status}, not {expected}: {answer}")
        return str(status)

    def _vanish(self) -> str:
        """Part of a request or all of it, and gone, politely or with a reset."""
        data = _post(*_systemone(self._random.randrange(1000))[:2])
        self._close()
        sock = self._connect()
        sock.sendall(data[: self._random.randrange(1, len(data) + 1)])
        if self._random.random() < 0.5:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self._close()
        return "gone"

    def _oversize(self) -> str:
        """More than the limit, declared or chunked: a 413 that arrives."""
        sock = self._connect()
        body = b"x" * (2 * LIMIT)
        if self._random.random() < 0.5:
            data = _post("/decide", body)
        else:
            chunks = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
            head = _post("/decide", b"").replace(
                b"Content-Length: 0", b"Transfer-Encoding: chunked"
            )
            data = head + chunks * 4 + b"0\r\n\r\n"
        sock.sendall(data)
        status, _ = self._receive(sock)
        if status not in (413, 429):
            raise AssertionError(f"{status}, not 413")
        return str(status)


_ENVELOPE = {"code", "message"}


def _more(sock: socket.socket) -> bytes:
    data = sock.recv(65536)
    if not data:
        raise ConnectionError("closed without a whole answer")
    return data


def _post(path: str, body: bytes, *, token: str = TOKEN, extra: str = "") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {token}\r\n"
        f"{extra}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


Case = tuple[str, bytes, Callable[[Any], bool]]


def _ask(state: Any, questions: dict[str, Any]) -> dict[str, Any]:
    answers: dict[str, Any] = fake_predict({"state": state, "questions": questions})
    return answers["answers"]


def _question(decision: dict[str, Any]) -> dict[str, Any]:
    criteria = {option["id"]: option["description"] for option in decision["options"]}
    return {
        "type": "choice",
        "instructions": decision["question"],
        "criteria": criteria,
    }


def _decide(seed: int) -> Case:
    decision = {"id": "d", "question": f"What of {seed}?", "options": OPTIONS}
    body = {"state": f"state {seed}", **decision}
    expected = _ask(body["state"], {"q": _question(decision)})["q"]
    return "/decide", json.dumps(body).encode(), lambda a: a["native"] == expected


def _shared(seed: int) -> Case:
    decisions = [
        {"id": f"d{i}", "question": f"What of {seed} {i}?", "options": OPTIONS}
        for i in range(18)
    ]
    state = {"seed": seed}
    expected = [_ask(state, {"q": _question(d)})["q"] for d in decisions]
    body = json.dumps({"state": state, "decisions": decisions}).encode()

    def check(answer: Any) -> bool:
        return [result["native"] for result in answer["results"]] == expected

    return "/decide/shared", body, check


def _systemone(seed: int) -> Case:
    questions = {
        "c": {"type": "choice", "criteria": {"x": "1", "y": str(seed)}},
        "n": {"type": "noul", "instructions": "?"},
    }
    state = ["s", seed]
    expected = _ask(state, questions)
    body = json.dumps({"state": state, "questions": questions}).encode()
    return "/v1/systemone", body, lambda answer: answer["answers"] == expected


def soak(seconds: float, clients: int = 32) -> Outcome:
    """Run both parts; a third of the time warms up."""
    outcome = Outcome()
    with serve(0.001, max_queue=16, max_body_bytes=LIMIT) as live:
        _run_clients(live, outcome, clients, seconds / 3, seed=0)
        outcome.before = _wait_until_quiet(live)
        _run_clients(live, outcome, clients, seconds * 2 / 3, seed=clients)
        outcome.after = _wait_until_quiet(live)
    return outcome


def _run_clients(
    live: LiveService, outcome: Outcome, clients: int, seconds: float, seed: int
) -> None:
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=SoakClient(live, outcome, seed + i).run, args=(until,))
        for i in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _wait_until_quiet(live: LiveService) -> Footprint:
    """The footprint once all clients are gone and nothing is left of them."""
    server, deadline = live.service.server, time.monotonic() + QUIET_SECONDS
    while server.open_connections or live.service.admission.admitted:
        if time.monotonic() > deadline:
            break  # the footprint will tell
        time.sleep(0.01)
    gc.collect()
    return Footprint(
        threads=_count_threads(),
        descriptors=len(os.listdir("/proc/self/fd")),
        admitted=live.service.admission.admitted,
        connections=server.open_connections,
        resident_mib=_resident_mib(),
    )


def _count_threads() -> int:
    """Threads that stay: one whose connection is closed may need a moment to end."""
    deadline = time.monotonic() + 2.0
    fewest = threading.active_count()
    while time.monotonic() < deadline and fewest > 3:  # main, inference, accept
        time.sleep(0.01)
        fewest = min(fewest, threading.active_count())
    return fewest


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> int:
    """Run the soak and print what it found; 1 when something is wrong or grew."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=32)
    options = parser.parse_args()
    outcome = soak(options.seconds, options.clients)
    sys.stdout.write(outcome.to_json() + "\n")
    before, after = outcome.before, outcome.after
    assert before is not None and after is not None
    grew = after.threads > before.threads or after.descriptors > before.descriptors
    return 1 if outcome.wrong or grew or after.admitted or after.connections else 0


if __name__ == "__main__":
    sys.exit(main())
