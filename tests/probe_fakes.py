"""A server to probe: the contract's surface without a model, and faults to plant in it.

It keeps its own HTTP layer, so that a fault of the real one cannot hide in both.
"""

from __future__ import annotations

import hashlib
import json
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fakes import fake_predict

from intern_decision_serve.errors import (
    Busy,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    OutOfMemory,
    ServiceError,
    TooLarge,
    Unauthorized,
)
from intern_decision_serve.mapping import build_decide, build_shared, plan_calls
from intern_decision_serve.systemone import build_answer, engine_request
from intern_decision_serve.validation import (
    parse_decide,
    parse_json,
    parse_shared,
    parse_systemone,
)

__all__ = [
    "FAULTS",
    "TOKEN",
    "FakeServer",
    "serving",
    "serving_again",
]

TOKEN = 'a-token-of-the-tests-"with|&<odd>\\signs'

FAULTS = {
    "shuffles results",
    "swaps answers between calls",
    "ignores the token",
    "drops the body cap",
    "drops the VRAM cap",
    "keeps memory after running out",
    "answers a closed client",
    "repeats unstably",
    "lies about call.index",
    "queues without bound",
    "refuses without Retry-After",
    "reads the body before refusing",
    "combines by arithmetic mean",
    "accepts NaN",
    "echoes the token",
    "resets now and then",
    "keeps the place of a client that left",
    "knows only the token's beginning",
    "lets /health wait for the model",
    "slows /health down while it is full",
    "asks to come back in 3000 years",
}


_UP_SECONDS = 1000.0  # the age of a server when a test meets it


@dataclass(slots=True)
class FakeServer:
    """What the handler threads share; `faults` are names out of FAULTS."""

    faults: frozenset[str] = frozenset()
    max_queue: int = 4
    max_tokens: int = 4000
    max_decisions: int = 64
    max_body_bytes: int = 65536
    call_seconds: float = 0.0
    vram_cap_gib: float | None = None
    largest_tokens: int = 10**9  # more is out of memory
    revision: str = "f" * 40
    seed: str = ""
    reports: bool = True  # the additive fields of /health
    admitted: int = 0
    scored: int = 0
    looks: int = 0  # at /health
    stopping_looks: int = 0  # so many of the next ones are told that it stops
    connections: int = 0
    tls: ssl.SSLContext | None = None
    reserved_mib: int = 1000
    started: float = field(default_factory=time.monotonic)
    places: threading.Lock = field(default_factory=threading.Lock)
    scoring: threading.Lock = field(default_factory=threading.Lock)
    port: int = 0

    def restart(self) -> None:
        """Be another process: away for three looks at /health, then young."""
        self.stopping_looks = 3
        self.started = time.monotonic()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def has(self, fault: str) -> bool:
        assert fault in FAULTS
        return fault in self.faults

    def health(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "status": "ok",
            "model": self.model(),
            "vram_cap_gib": self.vram_cap_gib,
            "max_tokens": self.max_tokens,
            "max_decisions": self.max_decisions,
            "max_questions_per_call": 16,
            "chunking": "by 16",
            "workloads": [],
        }
        if self.reports:
            free = self.max_queue - self.admitted
            cap = (self.vram_cap_gib or 2.0) * 1024
            peak = cap * 2 if self.has("drops the VRAM cap") else cap / 2
            document |= {
                "version": "0.0-fake",
                "queue": {"admitted": self.admitted, "slots_free": free},
                "memory": {
                    "baseline_mib": 1000,
                    "reserved_mib": self.reserved_mib,
                    "peak_mib": peak,
                },
                "limits": {"max_body_bytes": self.max_body_bytes},
                "uptime_seconds": time.monotonic() - self.started,
            }
        return document

    def model(self) -> dict[str, Any]:
        return {"name": "Fake", "revision": self.revision, "device": "none"}

    def predict(self, request: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The fake engine's answer to one call, held for `call_seconds`."""
        text = self.seed + json.dumps(request)
        if "<decision>" in text:
            raise InvalidRequest("the decision marker is reserved")
        tokens = 20 + len(text) // 4
        if tokens > self.max_tokens:
            raise InvalidRequest(f"{tokens} tokens are over {self.max_tokens}")
        if tokens > self.largest_tokens and not self.has("drops the VRAM cap"):
            if self.has("keeps memory after running out"):
                self.reserved_mib = 9000
            raise OutOfMemory("out of memory")
        time.sleep(self.call_seconds)
        self.scored += 1
        turn = self.scored if self.has("repeats unstably") else 0
        seeded = {**request, "state": [self.seed, turn, request["state"]]}
        response = fake_predict(seeded)
        response["usage"]["input_tokens"] = tokens
        return response, hashlib.sha256(text.encode()).hexdigest()

    def answer(self, path: str, document: object) -> dict[str, Any]:
        """One POST's whole answer; the scoring lock is held."""
        started = time.monotonic()
        if path == "/v1/systemone":
            one = parse_systemone(document)
            for question in one.questions.values():
                check_criteria(question)
            response, _ = self.predict(engine_request(one))
            return build_answer(one, response, f"Fake@{self.revision}")
        labels = {
            "model": self.model(),
            "prompt_version": "fake",
            "readout": "fake",
            "probability_status": "fake",
        }
        if path == "/decide":
            request = parse_decide(document, max_decisions=self.max_decisions)
            calls = plan_calls(request.state, [request.decision])
            scored = [self.predict(call.request) for call in calls]
            seconds = time.monotonic() - started
            return self.spoil(build_decide(request, calls, scored, labels, seconds))
        shared = parse_shared(document, max_decisions=self.max_decisions)
        calls = plan_calls(shared.state, shared.decisions)
        scored = [self.predict(call.request) for call in calls]
        seconds = time.monotonic() - started
        return self.spoil(build_shared(shared, calls, scored, labels, seconds))

    def spoil(self, body: dict[str, Any]) -> dict[str, Any]:
        """Plant the faults that are faults of a built answer."""
        results = body.get("results", [])
        if self.has("shuffles results"):
            results.reverse()
        if self.has("swaps answers between calls") and len(results) > 20:
            for name in ("probabilities", "native", "top", "confidence"):
                one, two = results[0], results[20]
                one[name], two[name] = two[name], one[name]
        if self.has("lies about call.index"):
            for result in results:
                result["call"]["index"] = 0
        if self.has("combines by arithmetic mean") and "combined" in body:
            ones = [
                dict(zip(one["option_ids"], one["probabilities"], strict=True))
                for one in body["orderings"]
            ]
            body["combined"]["probabilities"] = [
                sum(one[name] for one in ones) / len(ones)
                for name in body["option_ids"]
            ]
        return body


def check_criteria(question: dict[str, Any]) -> None:
    """What the engine's own validate_request refuses."""
    kind, criteria = question["type"], question.get("criteria")
    wanted = {"choice": dict, "score": (list, dict), "noul": object}[kind]
    if not isinstance(criteria, wanted):
        raise InvalidRequest(f"{kind} criteria are of another type")
    if kind != "noul" and not 1 <= len(criteria) <= 62:
        raise InvalidRequest(f"{len(criteria)} options")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    timeout = 20
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            fake = self.server.fake
            fake.looks += 1
            is_stopping = fake.stopping_looks > 0
            fake.stopping_looks -= is_stopping
            if fake.has("lets /health wait for the model"):
                with fake.scoring:
                    pass
            if fake.has("slows /health down while it is full"):
                time.sleep(0.03 * (fake.admitted == fake.max_queue))
            self.reply(503 if is_stopping else 200, fake.health())
        else:
            self.refuse(MethodNotAllowed("POST only", allow="POST"))

    def do_POST(self) -> None:
        fake = self.server.fake
        if fake.has("resets now and then") and fake.scored % 7 == 6:
            fake.scored += 1
            self.close_connection = True
            return
        try:
            self.check_head()
            if fake.has("reads the body before refusing"):
                self.read_body()
            with self.place():
                document = parse_body(fake, self.read_body())
                with self.turn() as self.scored:
                    body = fake.answer(self.path, document) if self.scored else None
            if body is None:
                self.close_connection = True
            else:
                self.reply(200, body)
        except ServiceError as error:
            self.refuse(error)

    def check_head(self) -> None:
        fake = self.server.fake
        given = self.headers.get("Authorization", "")
        wanted = f"Bearer {TOKEN}"
        if fake.has("knows only the token's beginning"):
            given, wanted = given[:20], wanted[:20]
        if given != wanted and not fake.has("ignores the token"):
            raise Unauthorized("wrong bearer")
        if self.path not in ("/decide", "/decide/shared", "/v1/systemone"):
            raise NotFound("no such path")

    @contextmanager
    def place(self) -> Iterator[None]:
        fake = self.server.fake
        with fake.places:
            full = fake.admitted >= fake.max_queue
            if full and not fake.has("queues without bound"):
                missing = fake.has("refuses without Retry-After")
                far = fake.has("asks to come back in 3000 years")
                wait = 99_999_999_999 if far else 2
                raise Busy("queue full", retry_after=None if missing else wait)
            fake.admitted += 1
        try:
            yield
        finally:
            keeps = fake.has("keeps the place of a client that left")
            with fake.places:
                fake.admitted -= not (keeps and self.scored and self.is_gone())

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Wait for the one model; yields whether the client is still there."""
        fake = self.server.fake
        while not fake.scoring.acquire(timeout=0.002):
            if self.is_gone():
                yield False
                return
        try:
            yield not self.is_gone()
        finally:
            fake.scoring.release()

    def is_gone(self) -> bool:
        if self.server.fake.has("answers a closed client"):
            return False
        if not select.select([self.connection], [], [], 0)[0]:
            return False
        return self.connection.recv(1, socket.MSG_PEEK) == b""

    def read_body(self) -> bytes:
        if hasattr(self, "body") and self.body is not None:
            return self.body
        fake = self.server.fake
        most = 10**9 if fake.has("drops the body cap") else fake.max_body_bytes
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size + 2)[:-2]
                if len(body) > most:
                    raise TooLarge("body too large")
            self.rfile.readline()
        else:
            size = int(self.headers.get("Content-Length", "0"))
            if size > most:
                raise TooLarge("body too large")
            body = self.rfile.read(size)
        if fake.has("reads the body before refusing"):
            self.body = body
        return body

    def refuse(self, error: ServiceError) -> None:
        message = error.message
        if self.server.fake.has("echoes the token"):
            message += f" {TOKEN}"
        headers = {"Allow": "POST"} if isinstance(error, MethodNotAllowed) else {}
        if error.retry_after is not None:
            headers["Retry-After"] = str(error.retry_after)
        whole = error.status == 422
        self.reply(
            error.status,
            {"error": {"code": error.code, "message": message}},
            headers if whole else {**headers, "Connection": "close"},
        )
        if not whole:
            self.drain()

    def drain(self) -> None:
        """Let the answer out before the rest of the body is thrown away."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(1.0)
        try:
            while self.connection.recv(65536):
                pass
        except OSError:
            pass

    def reply(self, status: int, body: object, headers: Any = None) -> None:
        raw = to_bytes(body)
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(raw))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)
        self.wfile.flush()

    body: bytes | None = None
    scored = False

    def handle_one_request(self) -> None:
        self.body = None
        self.scored = False
        super().handle_one_request()


def to_bytes(body: object) -> bytes:
    """What goes on the wire for an answer; tests put something else in its place."""
    return json.dumps(body).encode()


def parse_body(fake: FakeServer, raw: bytes) -> object:
    if fake.has("accepts NaN"):
        raw = raw.replace(b"NaN", b"0.5")
    return parse_json(raw, max_values=100_000)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    fake: FakeServer

    def get_request(self) -> tuple[socket.socket, Any]:
        sock, address = super().get_request()
        self.fake.connections += 1
        if self.fake.tls is not None:
            sock = self.fake.tls.wrap_socket(
                sock, server_side=True, do_handshake_on_connect=False
            )
        return sock, address

    def handle_error(self, *_: object) -> None:
        pass  # a client that left is no event here


@contextmanager
def serving(*faults: str, **settings: Any) -> Iterator[FakeServer]:
    """A fake server on a port of its own, with these faults, until the block ends."""
    fake = FakeServer(faults=frozenset(faults), **settings)
    assert fake.faults <= FAULTS
    with serving_again(fake):
        fake.started -= _UP_SECONDS
        yield fake


@contextmanager
def serving_again(fake: FakeServer) -> Iterator[None]:
    """The same server, started anew, on its old port or the first time on a new one."""
    server = _Server(("127.0.0.1", fake.port), _Handler)
    server.fake = fake
    fake.port = server.server_address[1]
    fake.started = time.monotonic()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
