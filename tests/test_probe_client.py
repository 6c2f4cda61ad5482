"""The probe's wire: one deadline, one try, every answer counted."""

from __future__ import annotations

import errno
import fcntl
import json
import resource
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from packaging_tools import find_tool
from probe_fakes import TOKEN, serving

from intern_decision_serve.probe import rawpost, wire
from intern_decision_serve.probe.client import Client, Tally
from intern_decision_serve.probe.foreign import decode
from intern_decision_serve.probe.rawpost import RawPost
from intern_decision_serve.probe.wire import Target, parse_target

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
BODY = {
    "id": "d",
    "state": "s",
    "question": "q?",
    "options": [{"id": "a", "description": "A"}, {"id": "b", "description": "B"}],
}


@contextmanager
def answering(
    *replies: bytes, hold: bool = False
) -> Iterator[tuple[Target, list[int]]]:
    """A peer that gives each connection one raw reply; counts connections."""
    listener = socket.create_server(("127.0.0.1", 0))
    seen: list[int] = []
    done = threading.Event()

    def serve() -> None:
        for reply in replies:
            connection, _ = listener.accept()
            with connection:
                seen.append(1)
                connection.recv(65536)
                connection.sendall(reply)
                if hold:
                    done.wait(10)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield Target("http", "127.0.0.1", listener.getsockname()[1], ""), seen
    finally:
        done.set()
        thread.join(5)
        listener.close()


def make_client(target: Target, tally: Tally, deadline: float = 10.0) -> Client:
    return Client(target, TOKEN, tally, deadline=deadline)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8100", "http://127.0.0.1:8100"),
        ("http://host", "http://host:80"),
        ("https://host/prefix/", "https://host:443/prefix"),
        ("http://[::1]:8100", "http://[::1]:8100"),
    ],
)
def test_an_address_is_read(url: str, shown: str) -> None:
    assert parse_target(url).url == shown


@pytest.mark.parametrize(
    "url",
    ["host:8100", "ftp://host", "http://", "http://u:p@host", "http://host/?q=1",
     "http://host:99999", "http://127.0.0.1:0"],
)  # fmt: skip
def test_a_bad_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        parse_target(url)


def test_one_connection_serves_many_requests() -> None:
    tally = Tally("here")
    with serving() as fake, make_client(parse_target(fake.url), tally) as client:
        answers = [client.post("/decide", BODY) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert tally.counts == {("here", "200", True): 3}


def test_a_dead_server_is_an_answer_with_a_reason() -> None:
    tally = Tally("here")
    with answering() as (target, _):
        pass
    with make_client(target, tally) as client:
        answer = client.get("/health")
    assert (answer.status, answer.code) == (0, "ConnectionRefusedError")
    assert tally.unexpected() == 1


def test_a_lost_answer_is_never_asked_for_again() -> None:
    tally = Tally("here")
    with answering(b"") as (target, seen):
        with make_client(target, tally) as client:
            answer = client.post("/decide", BODY)
        # A reset, when the server closed before it read the request.
        lost = ("no answer RemoteDisconnected", "no answer ConnectionResetError")
        assert answer.named in lost
        assert len(seen) == 1
    assert tally.counts == {("here", answer.named, False): 1}


def test_a_connection_the_server_closed_is_opened_anew() -> None:
    tally = Tally("here")
    with (
        answering(ANSWER, ANSWER) as (target, seen),
        make_client(target, tally) as client,
    ):
        assert client.get("/health").status == 200
        sock = client._connection._limited
        assert sock is not None
        sock.sock.settimeout(5)
        assert sock.sock.recv(1, socket.MSG_PEEK) == b""  # the peer's close is here
        assert client.get("/health").status == 200
        assert len(seen) == 2


def test_the_deadline_holds_for_an_answer_that_never_ends() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{"
    with answering(head, hold=True) as (target, _):
        with make_client(target, Tally(), deadline=0.2) as client:
            answer = client.get("/health")
    assert (answer.status, answer.code) == (0, "TimeoutError")


def test_a_body_after_connection_close_is_still_read() -> None:
    reply = b'HTTP/1.1 401 X\r\nConnection: close\r\n\r\n{"error":{"code":"c"}}'
    with answering(reply) as (target, _):
        with make_client(target, Tally()) as client:
            answer = client.get("/health", expected=(401,))
    assert answer.named == "401 c"


@pytest.mark.parametrize("raw", [b"NaN", b"<html>", b"", b'"\xff"'])
def test_an_answer_that_is_not_json_has_no_document(raw: bytes) -> None:
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(raw), raw)
    with answering(reply) as (target, _):
        with make_client(target, Tally()) as client:
            answer = client.get("/health")
    assert (answer.status, answer.document) == (200, None)


HEAD = b"HTTP/1.1 200 OK\r\n"
MANY = b" " * 2000


@pytest.mark.parametrize(
    ("reply", "failure"),
    [
        (HEAD + b"Content-Length: 1%s\r\n\r\n{" % (b"0" * 25), "TooLarge"),
        (HEAD + b"Content-Length: 1%s\r\n\r\n{" % (b"0" * 15), "TooLarge"),
        (HEAD + b"\r\n" + MANY, "TooLarge"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n" + MANY, "TooLarge"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n", "ValueError"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 200, "TooLarge"),
        (HEAD + b"Content-Length: 20\r\n\r\n{", "IncompleteRead"),
    ],
    ids=["1e25", "1e15", "endless", "chunk -1", "chunk -5", "100 Continue", "part"],
)
def test_no_answer_is_read_past_the_most(
    reply: bytes, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MOST_ANSWER_BYTES", 1000)
    with answering(reply, reply) as (target, _):
        with make_client(target, Tally()) as client:
            answer = client.get("/health")
        post = RawPost(target, TOKEN, "/decide", BODY, 5.0)
        post.send_head()
        raw = post.read(Tally(), expected=(), seconds=5.0)
        post.close()
    assert (answer.status, answer.code) == (0, failure)
    assert (raw.status, raw.code) == (0, failure)


@pytest.mark.parametrize(
    ("raw", "document"),
    [
        (b"[" * 200_000, None),
        (b"[" * 65 + b"]" * 65, None),
        (b'{"a":' * 900 + b"1" + b"}" * 900, None),
        (b"[%s]" % (b"9" * 401), [float("inf")]),
        (b"[-%s]" % (b"9" * 5000), [float("-inf")]),
        (b"[1%s]" % (b"0" * 300), [10**300]),
    ],
    ids=["200000 lists", "65 lists", "900 objects", "401 digits", "5000", "301"],
)
def test_what_no_report_could_hold_is_no_document(raw: bytes, document: object) -> None:
    assert decode(raw, TOKEN) == document


def test_a_refusal_sent_before_the_body_was_read_is_seen() -> None:
    tally = Tally()
    with serving() as fake, make_client(parse_target(fake.url), tally) as client:
        answer = client.post("/decide", b" " * 8_000_000, expected=(413,))
        assert answer.named == "413 request_too_large"
    assert tally.unexpected() == 0


def test_chunks_are_sent_without_a_length() -> None:
    with serving() as fake, make_client(parse_target(fake.url), Tally()) as client:
        raw = json.dumps(BODY).encode()
        assert client.post("/decide", iter([raw[:20], raw[20:]])).status == 200


def test_a_raw_post_can_hold_its_body_back() -> None:
    tally = Tally("raw")
    with serving() as fake:
        post = RawPost(parse_target(fake.url), TOKEN, "/decide", BODY, 5.0)
        post.send_head()
        post.send_body()
        answer = post.read(tally, expected=(200,), seconds=5.0)
        late = RawPost(parse_target(fake.url), TOKEN, "/decide", BODY, 5.0)
        late.send_head()
        nothing = late.read(tally, expected=(200,), seconds=0.05)
        post.close()
        late.close()
    assert answer.status == 200
    assert nothing.named == "no answer TimeoutError"
    assert tally.unexpected() == 1


@pytest.mark.parametrize(
    "piece",
    [b" ", b"HTTP/1.1 100 Continue\r\n\r\n"],
    ids=["body", "100 Continue"],
)
def test_a_raw_post_has_one_deadline_however_slowly_bytes_trickle(
    piece: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the socket brings a piece and takes a second of a clock of ours."""
    now = 1000.0
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" * (piece == b" ")

    class Trickling(socket.socket):
        def recv_into(self, buffer: Any, *_: Any) -> int:
            nonlocal now, head
            raw, head = head or piece, b""
            buffer[: len(raw)] = raw
            now += 1.0
            return len(raw)

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(rawpost, "open_socket", lambda *_: Trickling())
    posts = [RawPost(Target("http", "h", 1, ""), TOKEN, "/", BODY, 5.0) for _ in "ab"]
    answers = [post.read(Tally(), expected=(), seconds=5.0) for post in posts]
    for post in posts:
        post.close()
    assert [answer.code for answer in answers] == ["TimeoutError", "TimeoutError"]
    assert now <= 1000.0 + 5.0 + 2.0  # the second was sent as early as the first


def test_a_raw_post_names_an_ipv6_host_as_a_url_does() -> None:
    with answering() as (target, _):
        pass
    post = RawPost(Target("http", "::1", target.port, ""), TOKEN, "/", BODY, 5.0)
    post.close()
    assert f"\r\nHost: [::1]:{target.port}\r\n".encode() in post._head


def test_a_raw_post_to_nobody_is_a_failed_answer() -> None:
    tally = Tally("raw")
    with answering() as (target, _):
        pass
    post = RawPost(target, TOKEN, "/decide", BODY, 5.0)
    post.send_head()
    post.send_body()
    answer = post.read(tally, expected=(200,), seconds=5.0)
    post.close()
    assert answer.named == "no answer ConnectionRefusedError"
    assert tally.unexpected() == 1


def test_a_raw_post_whose_door_closed_reads_what_lies_behind_it() -> None:
    refusal = b"HTTP/1.1 429 X\r\nContent-Length: 2\r\n\r\n{}"
    with answering(refusal) as (target, _):
        post = RawPost(target, TOKEN, "/decide", BODY, 5.0)
        post.send_head()
        assert post._sock is not None
        post._sock.sock.recv(1, socket.MSG_PEEK)  # the refusal is here
        post._sock.sock.shutdown(socket.SHUT_WR)  # so that sending breaks for sure
        post.send_body()
        answer = post.read(Tally(), expected=(429,), seconds=5.0)
        post.close()
    assert answer.named == "429"


def test_no_descriptor_is_no_fault_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("socket.create_connection", none_left)
    with pytest.raises(wire.NoDescriptors, match="ulimit -n"):
        RawPost(Target("http", "h", 1, ""), TOKEN, "/decide", BODY, 5.0)


def test_a_connection_past_1024_descriptors_is_looked_at() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1100:
        pytest.skip("this machine allows fewer descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    try:
        with serving() as fake, make_client(parse_target(fake.url), Tally()) as client:
            assert client.get("/health").status == 200
            limited = client._connection._limited
            assert limited is not None
            low = limited.sock
            high = fcntl.fcntl(low.fileno(), fcntl.F_DUPFD, 1024)
            limited.sock = socket.socket(fileno=high)
            low.close()
            assert client.get("/health").status == 200
            assert fake.connections == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_aborted_request_is_not_counted() -> None:
    tally = Tally()
    with answering(b"HTTP/1.1 200 OK\r\n", hold=True) as (target, seen):
        client = make_client(target, tally)
        thread = threading.Thread(target=client.get, args=("/health",))
        thread.start()
        while not seen or client._connection._limited is None:
            pass
        client.abort()
        thread.join(5)
        client.close()
        assert not thread.is_alive()
    assert tally.counts == {}


def test_a_server_behind_tls_is_measured_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make_certificate(key, certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    tally = Tally("tls")
    with serving(tls=context) as fake:
        target = parse_target(fake.url.replace("http://127.0.0.1", "https://localhost"))
        with make_client(target, tally) as client:
            statuses = [client.post("/decide", BODY).status for _ in range(3)]
        assert fake.connections == 1
    assert statuses == [200, 200, 200]


def test_an_unknown_certificate_is_refused(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make_certificate(key, certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serving(tls=context) as fake:
        target = parse_target(fake.url.replace("http://127.0.0.1", "https://localhost"))
        with make_client(target, Tally()) as client:
            answer = client.get("/health")
    assert answer.named == "no answer SSLCertVerificationError"


def make_certificate(key: Path, certificate: Path) -> None:
    """A certificate of localhost that nobody else trusts."""
    openssl = find_tool("openssl", "openssl")
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *names, *files], check=True, capture_output=True)
