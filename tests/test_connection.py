"""One client's socket: every wait ends, and no answer is lost to a reset."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import WAIT
from wire import Wire, until

from intern_decision_serve import connection as connection_module
from intern_decision_serve.connection import Connection, Deadlines
from intern_decision_serve.errors import (
    BadRequest,
    HeadersTooLarge,
    RequestTimeout,
    ServiceError,
    TooLarge,
    UriTooLong,
)

LIMIT = 100_000
HEAD = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
PATIENT = dict.fromkeys(("idle", "head", "body", "answer"), float(WAIT))
SHORT = 0.05


class CountingSocket:
    """A socket that counts its writes and its reads."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.writes = 0
        self.reads = 0

    def send(self, data: bytes) -> int:
        self.writes += 1
        return self.sock.send(data)

    def recv(self, size: int) -> bytes:
        self.reads += 1
        return self.sock.recv(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)


class Pair:
    """A client's end and the server's Connection over the other end."""

    def __init__(self, deadlines: Deadlines) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.client = Wire(listener.getsockname(), receive_buffer=8192)
            self.sock, _ = listener.accept()
        self.counting = CountingSocket(self.sock)
        self.server = Connection(self.counting, deadlines)  # type: ignore[arg-type]

    def close(self) -> None:
        self.client.sock.close()
        self.sock.close()


Connect = Callable[..., Pair]


@pytest.fixture
def connect() -> Iterator[Connect]:
    pairs: list[Pair] = []

    def make(**deadlines: float) -> Pair:
        pairs.append(Pair(Deadlines(**{**PATIENT, **deadlines})))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def refused(call: Callable[[], object]) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        call()
    return caught.value


class Background:
    """Runs a call in a thread; `result` waits for it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._outcome: Any = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = self._call()
        except BaseException as failure:
            self._outcome = failure

    def result(self) -> Any:
        self._thread.join(WAIT)
        assert not self._thread.is_alive()
        return self._outcome


# --- heads --------------------------------------------------------------------------


def test_heads_are_read_one_by_one_and_the_rest_stays(connect: Connect) -> None:
    pair = connect()
    pair.client.send(HEAD + HEAD.replace(b"/", b"/two", 1) + b"body")
    first, second = pair.server.read_head(), pair.server.read_head()
    assert first is not None and second is not None
    assert (first.target, second.target) == ("/", "/two")
    assert pair.server.has_input
    assert pair.server.read_body(4, LIMIT) == b"body"
    assert not pair.server.has_input


def test_one_empty_line_before_a_request_is_skipped(connect: Connect) -> None:
    pair = connect()
    pair.client.send(b"\r\n" + HEAD)
    assert pair.server.read_head() is not None
    pair.client.send(b"\r\n\r\n" + HEAD)
    assert isinstance(refused(pair.server.read_head), BadRequest)


def test_an_empty_line_alone_starts_no_request(connect: Connect) -> None:
    """Old clients send one after a body; a 408 would answer their next request."""
    pair = connect(idle=SHORT)
    pair.client.send(b"\r\n")
    assert pair.server.read_head() is None


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"GET /health\r\n", BadRequest),
        (b"GET / HTTP/1.1\n", BadRequest),
        (b"x" * 9000, UriTooLong),
        (b"GET / HTTP/1.1\r\n" + b"A: " + b"x" * 40_000, HeadersTooLarge),
    ],
)
def test_a_head_that_is_wrong_already_is_not_waited_for(
    connect: Connect, sent: bytes, error: type[ServiceError]
) -> None:
    pair = connect()
    sending = Background(lambda: pair.client.send(sent))
    assert isinstance(refused(pair.server.read_head), error)
    pair.close()
    sending.result()


def test_end_of_file_before_a_request_is_no_request(connect: Connect) -> None:
    pair = connect()
    pair.client.half_close()
    assert pair.server.read_head() is None


def test_end_of_file_inside_a_head_is_answered(connect: Connect) -> None:
    pair = connect()
    pair.client.send(HEAD[:20]).half_close()
    error = refused(pair.server.read_head)
    assert error.message == "the connection ended inside the head"


def test_a_reset_is_no_request(connect: Connect) -> None:
    pair = connect()
    pair.client.send(HEAD[:20]).reset()
    assert pair.server.read_head() is None


def test_an_idle_client_is_let_go_without_an_answer(connect: Connect) -> None:
    assert connect(idle=SHORT).server.read_head() is None


def test_a_slow_head_is_a_timeout(connect: Connect) -> None:
    pair = connect(head=SHORT)
    pair.client.send(HEAD[:-1])
    error = refused(pair.server.read_head)
    assert (error.status, error.message) == (408, "the head did not arrive in time")


def test_dripping_does_not_move_the_deadline_of_a_head(connect: Connect) -> None:
    pair = connect(head=SHORT)
    over = threading.Event()

    def drip() -> None:
        pair.client.send(b"GET / HTTP/1.1\r\nX: ")
        while not over.wait(0.005):
            pair.client.send(b"x")

    dripping = Background(drip)
    assert isinstance(refused(pair.server.read_head), RequestTimeout)
    over.set()
    dripping.result()


# --- bodies -------------------------------------------------------------------------


def test_a_body_of_the_declared_length_is_read_whole(connect: Connect) -> None:
    pair = connect()
    body = bytes(range(256)) * 300
    sending = Background(lambda: pair.client.send(body + b"rest"))
    assert pair.server.read_body(len(body), LIMIT) == body
    sending.result()
    assert pair.server.read_body(4, LIMIT) == b"rest"


def test_a_chunked_body_leaves_what_follows_it(connect: Connect) -> None:
    pair = connect()
    pair.client.send(b"5\r\nhello\r\n0\r\n\r\n" + HEAD)
    assert pair.server.read_body(None, LIMIT) == b"hello"
    assert pair.server.read_head() is not None


def test_a_chunked_body_over_the_cap_is_refused(connect: Connect) -> None:
    pair = connect()
    pair.client.send(b"fffff\r\n")
    assert isinstance(refused(lambda: pair.server.read_body(None, LIMIT)), TooLarge)


@pytest.mark.parametrize("length", [10, None])
def test_a_short_body_is_refused(connect: Connect, length: int | None) -> None:
    pair = connect()
    pair.client.send(b"5\r\nh").half_close()
    error = refused(lambda: pair.server.read_body(length, LIMIT))
    assert (error.status, error.message) == (400, "the body is shorter than declared")


@pytest.mark.parametrize("length", [10, None])
def test_a_reset_inside_a_body_is_refused(connect: Connect, length: int | None) -> None:
    pair = connect()
    pair.client.send(b"5\r\nh").reset()
    error = refused(lambda: pair.server.read_body(length, LIMIT))
    assert error.message == "the connection broke inside the body"


@pytest.mark.parametrize("length", [10, None])
def test_a_slow_body_is_a_timeout(connect: Connect, length: int | None) -> None:
    pair = connect(body=SHORT)
    pair.client.send(b"5\r\nh")
    error = refused(lambda: pair.server.read_body(length, LIMIT))
    assert (error.status, error.message) == (408, "the body did not arrive in time")


def test_drips_buy_ever_fewer_wakeups(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    pair = connect()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        pair.client.send(b"x")

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(connection_module, "time", clock)
    pair.client.send(b"x")
    assert pair.server.read_body(12, LIMIT) == b"x" * 12
    assert pauses == [0.0005 * 2**n for n in range(7)] + [0.05] * 4


def test_a_long_read_ends_the_pauses(connect: Connect) -> None:
    pair = connect()
    pair.client.send(b"x")
    pair.server.read_body(1, LIMIT)
    assert pair.server._pause > 0
    sending = Background(lambda: pair.client.send(b"x" * 50_000))
    pair.server.read_body(50_000, LIMIT)
    sending.result()
    pair.server.send(b"answer")
    assert pair.server._pause == 0


# --- answers ------------------------------------------------------------------------


def test_an_answer_is_one_write(connect: Connect) -> None:
    pair = connect()
    assert pair.server.send(b"head and body")
    assert pair.counting.writes == 1


def test_an_answer_nobody_takes_is_given_up(connect: Connect) -> None:
    pair = connect(answer=SHORT)
    assert pair.server.send(bytes(64 * 1024 * 1024)) is False


def test_an_answer_to_a_gone_client_is_given_up(connect: Connect) -> None:
    pair = connect()
    pair.client.reset()
    assert pair.server.send(bytes(64 * 1024 * 1024)) is False


# --- gone ---------------------------------------------------------------------------


def test_a_client_is_gone_when_it_closed_half_closed_or_broke(connect: Connect) -> None:
    ends: list[Callable[[Wire], object]] = [
        lambda client: client.sock.close(),
        lambda client: client.half_close(),
        lambda client: client.reset(),
    ]
    for end in ends:
        pair = connect()
        assert not pair.server.is_gone()
        pair.client.send(b"pipelined")
        assert not pair.server.is_gone()
        end(pair.client)
        until(pair.server.is_gone)


def test_a_closed_socket_is_gone(connect: Connect) -> None:
    pair = connect()
    pair.sock.close()
    assert pair.server.is_gone()


# --- eviction and hurry -------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", HEAD[:10]])
def test_a_waiting_connection_can_be_evicted(connect: Connect, sent: bytes) -> None:
    pair = connect()
    pair.client.send(sent)
    reading = Background(pair.server.read_head)
    until(lambda: len(pair.server._buffer) == len(sent))
    pair.server.evict()
    assert reading.result() is None


def test_a_busy_connection_is_never_evicted(connect: Connect) -> None:
    pair = connect()
    pair.client.send(HEAD)
    assert pair.server.read_head() is not None
    assert pair.server.waiting_since is None
    pair.server.evict()
    assert pair.server.send(b"answer")
    assert pair.client.sock.recv(6) == b"answer"


def test_an_evicted_connection_serves_no_request_it_had_read(connect: Connect) -> None:
    """Evicted before it was parsed: its answer could not be sent any more."""
    pair = connect()
    pair.client.send(HEAD)
    until(lambda: pair.sock.recv(len(HEAD), socket.MSG_PEEK) == HEAD)
    pair.server.evict()
    assert pair.server.read_head() is None


def test_a_hurried_body_is_a_timeout_that_still_gets_its_answer(
    connect: Connect,
) -> None:
    pair = connect()
    reading = Background(lambda: pair.server.read_body(10, LIMIT))
    until(lambda: pair.server.slow_since is not None)
    pair.server.hurry()
    error = reading.result()
    assert isinstance(error, RequestTimeout)
    assert error.message == "the body came slowly while others waited for a slot"
    assert pair.server.send(b"answer")
    assert pair.client.sock.recv(6) == b"answer"
    assert pair.server.slow_since is None


def test_a_hurried_answer_is_given_up(connect: Connect) -> None:
    pair = connect()
    sending = Background(lambda: pair.server.send(bytes(64 * 1024 * 1024)))
    until(lambda: pair.server.slow_since is not None)
    pair.server.hurry()
    assert sending.result() is False


def test_nobody_else_is_hurried(connect: Connect) -> None:
    pair = connect()
    pair.server.hurry()
    pair.client.send(HEAD)
    assert pair.server.read_head() is not None


# --- lingering ----------------------------------------------------------------------


def upload(client: Wire, size: int) -> None:
    part = bytes(1024 * 1024)
    for _ in range(size // len(part)):
        client.sock.sendall(part)


def test_a_client_that_writes_50_mb_first_still_reads_its_answer(
    connect: Connect,
) -> None:
    pair = connect()
    sending = Background(lambda: upload(pair.client, 50_000_000))
    assert pair.server.send(b"refused")
    lingering = Background(pair.server.linger)
    assert sending.result() is None
    assert pair.client.sock.recv(100) == b"refused"
    assert pair.client.is_at_end()
    pair.client.sock.close()
    assert lingering.result() is None


def test_lingering_ends_by_its_seconds(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "LINGER_SECONDS", SHORT)
    pair = connect()
    pair.client.send(b"x")
    pair.server.linger()


def test_lingering_ends_by_its_bytes(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "LINGER_BYTES", 1_000_000)
    pair = connect()
    sending = Background(lambda: upload(pair.client, 50_000_000))
    pair.server.linger()
    pair.close()
    assert isinstance(sending.result(), OSError)


def test_silent_lingering_clients_take_no_place_from_one_that_writes(
    connect: Connect,
) -> None:
    silent = [connect() for _ in range(4 * connection_module.MAX_DRAINING)]
    lingering = [Background(pair.server.linger) for pair in silent]
    for pair in silent:
        assert pair.client.sock.recv(1) == b""
    test_a_client_that_writes_50_mb_first_still_reads_its_answer(connect)
    for pair in silent:
        pair.client.sock.close()
    for each in lingering:
        assert each.result() is None


def test_a_lingering_connection_can_be_evicted(connect: Connect) -> None:
    pair = connect()
    lingering = Background(pair.server.linger)
    assert pair.client.sock.recv(1) == b""
    assert pair.server.waiting_since is not None
    pair.server.evict()
    assert lingering.result() is None


def test_lingering_on_a_client_that_is_gone_is_no_failure(connect: Connect) -> None:
    pair = connect()
    pair.client.reset()
    until(pair.server.is_gone)
    pair.server.linger()


def test_started_at_is_when_the_request_began_not_the_connection(
    connect: Connect,
) -> None:
    pair = connect()
    waits: list[float] = []
    readable = pair.server._readable

    def poll(milliseconds: float) -> list[tuple[int, int]]:
        waits.append(milliseconds)
        return readable.poll(milliseconds)

    pair.server._readable = SimpleNamespace(poll=poll)  # type: ignore[assignment]
    reading = Background(pair.server.read_head)
    until(lambda: waits)
    before = time.monotonic()
    pair.client.send(HEAD)
    assert reading.result() is not None
    assert pair.server.started_at >= before


def test_a_readiness_that_was_none_is_waited_out(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = connect()
    answers: list[Any] = [BlockingIOError(), BlockingIOError()]

    def recv(size: int) -> bytes:
        if answers:
            raise answers.pop()
        return pair.sock.recv(size)

    monkeypatch.setattr(pair.counting, "recv", recv)
    pair.client.send(HEAD)
    assert pair.server.read_head() is not None


def test_an_answer_larger_than_the_kernels_room_arrives_whole(connect: Connect) -> None:
    pair = connect()
    data = bytes(range(256)) * 32_768
    sending = Background(lambda: pair.server.send(data))
    received = bytearray()
    while len(received) < len(data):
        received += pair.client.sock.recv(65536)
    assert sending.result() is True
    assert received == data


def test_thousands_of_chunks_in_one_read_are_paid_with_a_pause(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    clock = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    monkeypatch.setattr(connection_module, "time", clock)
    for count, pause in ((50, 0), (1000, 936 * 0.00005)):
        pair = connect()
        pair.server._buffer += b"1\r\nx\r\n" * count + b"0\r\n\r\n"
        assert pair.server.read_body(None, LIMIT) == b"x" * count
        assert sum(pauses) == pytest.approx(pause, abs=0.0001)
