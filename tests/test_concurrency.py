"""Many clients at once: one call at a time, and nobody costs another more than due."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import random
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from fakes import WAIT, fake_predict
from running import DECIDE, SYSTEMONE, RunningService, make_shared
from wire import TOKEN, Answer, Wire, make_request, until

from intern_decision_serve import jobs as jobs_module
from intern_decision_serve import server as server_module
from intern_decision_serve.connection import Deadlines
from intern_decision_serve.server import Server

Start = Callable[..., RunningService]


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What each of `count` threads, let go together, gave or raised."""
    outcomes: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        barrier.wait()
        try:
            outcomes[number] = work(number)
        except BaseException as failure:
            outcomes[number] = failure

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * WAIT)
        assert not thread.is_alive()
    return outcomes


# --- one call at a time -------------------------------------------------------------


def test_no_two_requests_are_inside_the_engine_and_none_is_interleaved(
    service: RunningService,
) -> None:
    def work(number: int) -> Answer:
        return service.post(
            "/decide/shared", {**make_shared(40), "state": f"s{number}"}
        )

    answers = in_threads(12, work)
    assert [answer.status for answer in answers] == [200] * 12
    engine = service.engine
    assert engine.most_inside == 1
    assert {thread for thread, _ in engine.records} == {engine.loaded_on}
    states = [request["state"] for request in engine.requests]
    groups = [states[at : at + 3] for at in range(0, 36, 3)]
    assert all(len(set(group)) == 1 for group in groups)
    assert {group[0] for group in groups} == {f"s{n}" for n in range(12)}


def test_each_client_gets_its_own_answer(service: RunningService) -> None:
    def work(number: int) -> Any:
        with service.wire() as wire:
            return [
                wire.post("/v1/systemone", {**SYSTEMONE, "state": f"{number}.{turn}"})
                for turn in range(5)
            ]

    for number, answers in enumerate(in_threads(16, work)):
        for turn, answer in enumerate(answers):
            sent = {**SYSTEMONE, "state": f"{number}.{turn}"}
            assert answer.json["answers"] == fake_predict(sent)["answers"]


def test_open_documents_answer_while_a_call_is_blocked_and_the_queue_is_full(
    start_service: Start,
) -> None:
    service = start_service(max_queue=2)
    service.engine.gate.clear()
    with service.wire() as first, service.wire() as second:
        for wire in (first, second):
            wire.send(make_request("/decide", DECIDE))
        until(lambda: service.admitted == 2)
        for _ in range(20):
            answer = service.get("/health", token=None)
            assert (answer.status, answer.json["queue"]["slots_free"]) == (200, 0)
        assert service.get("/v1/models").status == 200
        assert service.post("/decide", DECIDE).status == 429
        service.engine.gate.set()
        assert [first.read().status, second.read().status] == [200, 200]


# --- overload -----------------------------------------------------------------------


@pytest.mark.parametrize("clients", [40, 200])
def test_a_burst_gets_only_200_and_429_and_no_reset(
    start_service: Start, clients: int
) -> None:
    service = start_service(max_queue=4)
    service.engine.gate.clear()
    opener = threading.Thread(
        target=lambda: (
            until(lambda: _count(service, "busy")),
            service.engine.gate.set(),
        )
    )
    opener.start()

    def work(number: int) -> int:
        answer = service.post("/decide", DECIDE)
        if answer.status == 429:
            assert answer.code == "busy"
            assert 1 <= int(answer.headers["retry-after"]) <= 30
        return answer.status

    statuses = in_threads(clients, work)
    opener.join()
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 4


def _count(service: RunningService, code: str) -> int:
    return service.outcomes.get(code, 0)


def test_the_sdks_own_retry_clears_a_429(start_service: Start) -> None:
    sdk = pytest.importorskip("typesafe_sdk")
    service = start_service(max_queue=1)
    service.engine.gate.clear()
    held = service.wire().send(make_request("/decide", DECIDE))
    service.engine.wait_for_call()

    def let_go() -> None:
        until(lambda: _count(service, "busy"))
        service.engine.gate.set()

    opener = threading.Thread(target=let_go)
    opener.start()
    with sdk.TypeSafeClient(base_url=service.server.url, api_key=TOKEN) as client:
        response = client.system_one("s", {"ok": sdk.Noul(instructions="?")})
    opener.join()
    assert 0 <= response.nouls["ok"].noul <= 1
    assert held.read().status == 200
    held.sock.close()


def test_the_sdk_without_retries_sees_the_429_and_its_wait(
    start_service: Start,
) -> None:
    sdk = pytest.importorskip("typesafe_sdk")
    service = start_service(max_queue=1)
    service.engine.gate.clear()
    with service.wire() as held:
        held.send(make_request("/decide", DECIDE))
        service.engine.wait_for_call()
        never = sdk.RetryPolicy(max_retries=0)
        url = service.server.url
        with sdk.TypeSafeClient(base_url=url, api_key=TOKEN, retry=never) as client:
            with pytest.raises(sdk.TypeSafeRateLimitError) as caught:
                client.system_one("s" * 5000, {"ok": sdk.Noul(instructions="?")})
        assert caught.value.status == 429
        assert int(caught.value.headers["retry-after"]) >= 1
        service.engine.gate.set()
        assert held.read().status == 200


def test_one_client_after_another_never_meets_its_own_slot(
    start_service: Start,
) -> None:
    """The slot is free before the client that got its answer can come back."""
    service = start_service(max_queue=1)
    with service.wire() as wire:
        for _ in range(200):
            assert wire.post("/decide", DECIDE).status == 200


# --- clients that are gone ----------------------------------------------------------


def test_gone_clients_cost_no_call_and_their_slots_are_free_at_once(
    start_service: Start,
) -> None:
    service = start_service(max_queue=7)
    service.engine.gate.clear()
    with service.wire() as held:
        held.send(make_request("/decide", DECIDE))
        service.engine.wait_for_call()
        gone = [service.wire() for _ in range(6)]
        for wire in gone:
            wire.send(make_request("/decide", {**DECIDE, "state": "gone"}))
        until(lambda: service.admitted == 7)
        gone[0].half_close()  # counts as gone, too
        for wire in gone[1:3]:
            wire.reset()
        for wire in gone[3:]:
            wire.sock.close()
        until(lambda: service.admitted == 1)  # the call before them still runs
        assert gone[0].is_at_end()
        gone[0].sock.close()
        live = service.wire().send(make_request("/decide", DECIDE))
        until(lambda: service.admitted == 2)
        service.engine.gate.set()
        assert held.read().status == 200
        assert live.read().status == 200
        live.sock.close()
    assert [request["state"] for request in service.engine.requests] == ["s", "s"]
    assert _count(service, "client_gone") == 6
    until(lambda: service.get("/health").json["requests"]["skipped"] == 6)


def test_a_client_gone_before_its_turn_is_not_even_parsed(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 clients that sent 50 kB and left made a small request take 2 s."""
    parsed: list[int] = []
    parse = service.service.api._parse

    def count(body: bytes) -> object:
        parsed.append(len(body))
        return parse(body)

    monkeypatch.setattr(service.service.api, "_parse", count)
    service.engine.gate.clear()
    with service.wire() as held:
        held.send(make_request("/decide", DECIDE))
        service.engine.wait_for_call()
        wire = service.wire()
        wire.send(make_request("/decide", {**DECIDE, "state": "s" * 50_000}))
        until(lambda: service.worker.turns._waiting == 1)
        wire.sock.close()
        service.engine.gate.set()
        assert held.read().status == 200
    until(lambda: _count(service, "client_gone") == 1)
    assert len(parsed) == 1
    assert service.worker.skipped == 1


def test_a_client_gone_between_its_calls_frees_the_rest(
    service: RunningService,
) -> None:
    service.engine.gate.clear()
    wire = service.wire().send(make_request("/decide/shared", make_shared(64)))
    service.engine.wait_for_call()
    wire.sock.close()
    service.engine.gate.set()
    until(lambda: _count(service, "client_gone") == 1)
    assert service.admitted == 0
    assert len(service.engine.records) < 4


def test_a_running_call_keeps_the_slot_of_a_gone_client(
    start_service: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "GONE_CHECK_SECONDS", 0.001)
    service = start_service(max_queue=1)
    service.engine.gate.clear()
    wire = service.wire().send(make_request("/decide", DECIDE))
    service.engine.wait_for_call()
    wire.sock.close()
    for _ in range(20):
        assert service.post("/decide", DECIDE).status == 429
    service.engine.gate.set()
    until(lambda: service.admitted == 0)
    assert service.post("/decide", DECIDE).status == 200


# --- slow clients -------------------------------------------------------------------


class Dripping:
    """A client that sends a body byte by byte, until it is answered or cut."""

    def __init__(self, service: RunningService) -> None:
        self.wire = service.wire()
        self.wire.send(make_request("/decide", headers={"Content-Length": "10000"}))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._drip)
        self._thread.start()

    def _drip(self) -> None:
        with contextlib.suppress(OSError):
            while not self._over.wait(0.005):
                self.wire.send(b" ")

    def end(self) -> Answer:
        try:
            return self.wire.read()
        finally:
            self._over.set()
            self._thread.join(WAIT)
            self.wire.sock.close()


def test_dripping_clients_free_their_slots_by_the_deadline(
    start_service: Start,
) -> None:
    service = start_service({"deadlines": Deadlines(body=0.1)}, max_queue=3)
    dripping = [Dripping(service) for _ in range(3)]
    for client in dripping:
        assert client.end().status == 408
    until(lambda: service.admitted == 0)
    assert service.post("/decide", DECIDE).status == 200


def test_a_dripping_client_cannot_keep_others_out(
    start_service: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every slot held by slow bodies, who is refused makes the slowest end."""
    monkeypatch.setattr(server_module, "HURRY_AFTER_SECONDS", 0.0)
    service = start_service(max_queue=2)
    dripping = [Dripping(service) for _ in range(2)]
    until(lambda: service.admitted == 2)
    statuses: list[int] = []

    def get_in() -> bool:
        statuses.append(service.post("/decide", DECIDE).status)
        return statuses[-1] == 200

    until(get_in)
    assert set(statuses) == {429, 200}
    until(lambda: service.server.hurry_slowest() or service.admitted == 0)
    for client in dripping:
        assert client.end().status == 408


def test_nobody_is_hurried_before_the_time(start_service: Start) -> None:
    service = start_service(max_queue=1)
    body = make_request("/", DECIDE).split(b"\r\n\r\n", 1)[1]
    with service.wire() as wire:
        headers = {"Content-Length": str(len(body))}
        wire.send(make_request("/decide", headers=headers))
        until(lambda: service.admitted == 1)
        assert service.post("/decide", DECIDE).status == 429
        assert wire.send(body).read().status == 200


def test_a_client_that_never_reads_frees_its_slot(start_service: Start) -> None:
    service = start_service({"deadlines": Deadlines(answer=0.1)}, max_queue=1)

    def predict(request: dict[str, Any]) -> dict[str, Any]:
        return {**fake_predict(request), "padding": "x" * 16_000_000}

    service.engine.predict = predict
    with service.wire(receive_buffer=4096) as wire:
        wire.send(make_request("/v1/systemone", SYSTEMONE))
        until(lambda: service.outcomes == {"ok": 1})
        assert service.admitted == 0
        assert service.post("/decide", DECIDE).status == 200


def test_slow_heads_keep_nobody_out(
    start_service: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slowloris: at the bound, who waits longest for a head makes room."""
    monkeypatch.setattr(server_module, "EVICT_AFTER_SECONDS", 0.0)
    service = start_service({"max_connections": 5})
    slow = [service.wire().send(b"GET / HTTP/1.1\r\nX: ") for _ in range(5)]
    until(lambda: service.server.open_connections == 5)
    assert service.post("/decide", DECIDE).status == 200
    for wire in slow:
        wire.sock.close()


def test_lingering_clients_keep_nobody_out(
    start_service: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused strangers that neither send nor close hold no connection for long."""
    monkeypatch.setattr(server_module, "EVICT_AFTER_SECONDS", 0.0)
    service = start_service({"max_connections": 12})
    stubborn = [service.wire() for _ in range(12)]
    for wire in stubborn:
        head = make_request("/decide", token=None, headers={"Content-Length": "9"})
        assert wire.send(head).read().status == 401
    assert service.post("/decide", DECIDE).status == 200
    for wire in stubborn:
        wire.sock.close()


def test_over_the_bound_connections_wait_in_the_backlog(start_service: Start) -> None:
    service = start_service({"max_connections": 2}, max_queue=2)
    service.engine.gate.clear()
    held = [service.wire().send(make_request("/decide", DECIDE)) for _ in range(2)]
    until(lambda: service.admitted == 2)
    third = service.wire().send(make_request("/health", method="GET"))
    service.engine.gate.set()
    for wire in held:
        assert wire.read().status == 200
        wire.sock.close()
    assert third.read().status == 200
    assert service.server.open_connections <= 2
    third.sock.close()


def test_busy_connections_are_never_evicted(
    start_service: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "EVICT_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(server_module, "LOOK_AGAIN_SECONDS", 0.001)
    service = start_service({"max_connections": 3})
    looked: list[float] = []
    evict = service.server._evict

    def look(since: float) -> None:
        looked.append(since)
        evict(since)

    monkeypatch.setattr(service.server, "_evict", look)
    service.engine.gate.clear()
    busy = [service.wire().send(make_request("/decide", DECIDE)) for _ in range(3)]
    until(lambda: service.admitted == 3)
    waiting = service.wire().send(make_request("/health", method="GET"))
    until(lambda: len(looked) > 5)
    service.engine.gate.set()
    for wire in (*busy, waiting):
        assert wire.read().status == 200
        wire.sock.close()


# --- what the system refuses --------------------------------------------------------


class ScarceSocket:
    """A listener whose next accepts fail, as with no descriptor left."""

    def __init__(self, sock: socket.socket, failures: list[int]) -> None:
        self.sock = sock
        self.failures = failures

    def accept(self) -> Any:
        if self.failures:
            number = self.failures.pop()
            raise OSError(number, os.strerror(number))
        return self.sock.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)


def test_without_descriptors_the_acceptor_goes_on_and_evicts(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = service.wire()
    until(lambda: service.server.open_connections == 1)
    failures = [errno.EMFILE, errno.ECONNABORTED]
    monkeypatch.setattr(
        service.server, "socket", ScarceSocket(service.server.socket, failures)
    )
    assert service.post("/decide", DECIDE).status == 200
    assert failures == []
    assert idle.is_at_end()
    idle.sock.close()


def test_without_a_thread_the_connection_is_closed_and_the_acceptor_goes_on(
    service: RunningService,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = [1]
    start = socketserver.ThreadingMixIn.process_request

    def refuse(self: Any, request: Any, address: Any) -> None:
        if refusals:
            refusals.pop()
            raise RuntimeError("can't start new thread")
        start(self, request, address)

    monkeypatch.setattr(socketserver.ThreadingMixIn, "process_request", refuse)
    with service.wire() as wire:
        assert wire.is_at_end()
    assert service.post("/decide", DECIDE).status == 200
    assert "no thread for a connection" in caplog.text


def test_a_full_server_can_still_be_shut_down(start_service: Start) -> None:
    service = start_service({"max_connections": 1})
    busy = service.wire()
    service.engine.gate.clear()
    busy.send(make_request("/decide", DECIDE))
    service.engine.wait_for_call()
    waiting = service.wire()  # the acceptor now waits for room
    service.server.shutdown()
    service.engine.gate.set()
    assert busy.read().status == 200
    busy.sock.close()
    waiting.sock.close()


# --- stopping -----------------------------------------------------------------------


def test_stopping_answers_what_is_admitted_and_refuses_the_next(
    start_service: Start,
) -> None:
    service = start_service()
    service.engine.gate.clear()
    wires = [service.wire() for _ in range(4)]
    for wire in wires[:3]:
        wire.send(make_request("/decide", DECIDE))
    until(lambda: service.admitted == 3)
    service.engine.wait_for_call()
    until(lambda: service.worker._queue.qsize() == 2)
    service.worker.stop()
    answer = wires[3].post("/decide", DECIDE)
    assert (answer.status, answer.code) == (503, "shutting_down")
    service.engine.gate.set()
    assert [wire.read().status for wire in wires[:3]] == [200] * 3
    for wire in wires:
        wire.sock.close()


# --- everything at once -------------------------------------------------------------


def good(service: RunningService, random_one: random.Random) -> None:
    state = str(random_one.random())
    with service.wire() as wire:
        for _ in range(random_one.randrange(1, 4)):
            body = {**SYSTEMONE, "state": state}
            answer = wire.post("/v1/systemone", body)
            if answer.status == 200:
                assert answer.json["answers"] == fake_predict(body)["answers"]
            else:
                assert (answer.status, answer.code) == (429, "busy")
                return


def bad(service: RunningService, random_one: random.Random) -> None:
    body, status = random_one.choice([(b"{", 422), (b"[]", 422), (b"\xff", 422)])
    assert service.post("/decide", body).status in (status, 429)
    assert service.post("/decide", body, token=None).status == 401


def oversized(service: RunningService, random_one: random.Random) -> None:
    size = random_one.choice([1_100_000, 3_000_000])
    assert service.post("/decide", bytes(size)).status in (413, 429)


def vanishing(service: RunningService, random_one: random.Random) -> None:
    sent = make_request("/decide/shared", make_shared(40))
    wire = service.wire().send(sent[: random_one.randrange(1, len(sent))])
    random_one.choice([wire.reset, wire.sock.close])()
    wire = service.wire().send(sent)
    random_one.choice([wire.reset, wire.sock.close])()


def slow(service: RunningService, random_one: random.Random) -> None:
    sent = make_request("/decide", DECIDE)
    with service.wire() as wire:
        for at in range(0, len(sent), 50):
            wire.send(sent[at : at + 50])
            time.sleep(0.001)
        assert wire.read().status in (200, 429)


def test_a_short_soak_of_every_kind_of_client_leaves_nothing_behind(
    start_service: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    service = start_service(max_queue=8)
    threads_before = threading.active_count()
    descriptors_before = _open_descriptors()
    kinds = [good, bad, oversized, vanishing, slow]

    def work(number: int) -> None:
        random_one = random.Random(number)
        for _ in range(8):
            random_one.choice(kinds)(service, random_one)

    assert [one for one in in_threads(32, work) if one is not None] == []
    until(lambda: service.server.open_connections == 0)
    until(lambda: service.admitted == 0)
    until(lambda: threading.active_count() == threads_before)
    gc.collect()
    until(lambda: _open_descriptors() == descriptors_before)
    assert service.worker._pending_calls == 0
    assert service.post("/decide", DECIDE).status == 200
    assert caplog.records == []


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_server_closes_its_own_listener(start_service: Start) -> None:
    service = start_service()
    assert isinstance(service.server, Server)
    service.service.close()
    with pytest.raises(ConnectionRefusedError):
        Wire(service.address)
    service.service.server.server_close()
