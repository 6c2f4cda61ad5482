"""The shipped haproxy.cfg in a real HAProxy: instances die, clients do not notice."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from balancing import (
    CONFIGURATION,
    Balancer,
    find_haproxy,
    make_certificate,
    run_balancer,
    write_config,
)
from demo_server import TOKEN, DemoServer, exchange, start_demo
from instances import BREAK, HOLD, LOSE, RELEASE, start_instance
from packaging_tools import SYSTEMD

from intern_decision_serve.config import load_config
from intern_decision_serve.connection import Deadlines
from intern_decision_serve.demo import DemoCheckpoint

BODY = {
    "state": "s",
    "id": "d",
    "question": "q",
    "options": [{"id": "a", "description": ""}, {"id": "b", "description": ""}],
}
# Nearly MAX_BODY_BYTES: what is replayed must not depend on its length.
HELD = {**BODY, "state": HOLD, "padding": "x" * 1_000_000}
NO_INSTANCE = {"code": "no_instance", "message": "no instance takes requests now"}
BUSY = {"code": "busy", "message": "too many requests are waiting"}
WAIT = 30.0  # seconds until a test that hangs fails; nothing waits so long when well

Start = Callable[..., list[DemoServer]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balancer]:
    """Two instances that stay well, behind one balancer."""
    find_haproxy()
    directory = tmp_path_factory.mktemp("shared")
    pair = [start_instance(directory / str(number), 0.005) for number in range(2)]
    try:
        for instance in pair:
            instance.wait_until_ready()
        with run_balancer(directory, [instance.url for instance in pair]) as balancer:
            yield balancer
    finally:
        end(pair)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start instances that a test may harm; they end with it."""
    started: list[DemoServer] = []

    def start(count: int = 2, **settings: Any) -> list[DemoServer]:
        find_haproxy()
        made = [
            start_instance(tmp_path / f"instance-{len(started) + number}", **settings)
            for number in range(count)
        ]
        started.extend(made)
        for instance in made:
            instance.wait_until_ready()
        return made

    yield start
    end(started)


def end(instances: list[DemoServer]) -> None:
    for instance in instances:
        instance.process.kill()
        instance.process.wait()


def ask(host: str, path: str, body: object = None) -> tuple[int, Any]:
    """One request on a connection of its own; the status and the JSON answer."""
    with contextlib.closing(http.client.HTTPConnection(host, timeout=WAIT)) as client:
        return exchange(client, path, body)


def ask_closely(
    host: str, token: str = TOKEN, **headers: str
) -> tuple[int, Any, http.client.HTTPMessage]:
    """One /decide on a connection of its own; with the headers of its answer."""
    given = {"Authorization": f"Bearer {token}", **headers}
    with contextlib.closing(http.client.HTTPConnection(host, timeout=WAIT)) as client:
        client.request("POST", "/decide", json.dumps(BODY), given)
        answer = client.getresponse()
        return answer.status, json.loads(answer.read()), answer.headers


def queue_of(instance: DemoServer) -> dict[str, Any]:
    queue: dict[str, Any] = instance.ask("/health")[1]["queue"]
    return queue


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


class Post:
    """One POST in a thread of its own; `result` once it is joined."""

    def __init__(self, host: str, body: object, path: str = "/decide") -> None:
        self.status, self.document = 0, None
        self._thread = threading.Thread(target=self._run, args=(host, body, path))
        self._thread.start()

    def _run(self, host: str, body: object, path: str) -> None:
        self.status, self.document = ask(host, path, body)

    def join(self) -> tuple[int, Any]:
        self._thread.join(WAIT)
        return self.status, self.document


class Stream:
    """Clients that never stop asking and never ask twice; what they were told.

    So many that one instance must take all of them at once when the other is gone.
    """

    def __init__(self, host: str, clients: int = 16) -> None:
        self.outcomes: Counter[tuple[object, str | None]] = Counter()
        self._host = host
        self._told = threading.Condition()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def _run(self) -> None:
        client = http.client.HTTPConnection(self._host, timeout=WAIT)
        with contextlib.closing(client):
            while not self._stopping.is_set():
                try:
                    status: object
                    status, document = exchange(client, "/decide", BODY)
                except (OSError, http.client.HTTPException) as error:
                    status, document = repr(error), {}
                with self._told:
                    self.outcomes[status, document.get("top")] += 1
                    self._told.notify_all()

    def __enter__(self) -> Stream:
        for thread in self._threads:
            thread.start()
        self.wait_for(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(WAIT)

    def wait_for(self, more: int) -> None:
        """Block until that many more answers have come."""
        with self._told:
            until = self.outcomes.total() + more
            assert self._told.wait_for(lambda: self.outcomes.total() >= until, WAIT)


def hold_both(balancer: Balancer, pair: list[DemoServer]) -> list[Post]:
    """One held call at each instance: least connections gives each its own."""
    first = Post(balancer.host, HELD)
    wait_until(lambda: any(queue_of(i)["scoring"] for i in pair), "a held call")
    second = Post(balancer.host, HELD)
    wait_until(lambda: all(queue_of(i)["scoring"] for i in pair), "two held calls")
    return [first, second]


class TestTheFile:
    def test_haproxy_finds_nothing_to_say(self, tmp_path: Path) -> None:
        haproxy = find_haproxy()
        servers = ["127.0.0.1:8100", "127.0.0.1:8101"]
        path = write_config(tmp_path, make_certificate(tmp_path), servers)
        done = subprocess.run(
            [haproxy, "-c", "-f", str(path)], capture_output=True, text=True
        )
        said = (done.stdout + done.stderr).strip()
        assert (done.returncode, said) == (0, "Configuration file is valid")

    def test_a_whole_body_and_its_head_fit_the_buffer_that_is_replayed(self) -> None:
        config = load_config({"INTERN_DECISION_API_TOKEN": TOKEN})
        assert setting("tune.bufsize") == config.max_body_bytes + 64 * 1024

    def test_an_instance_is_never_filled_from_here(self) -> None:
        config = load_config({"INTERN_DECISION_API_TOKEN": TOKEN})
        left = config.max_queue - setting(r"rise 1 maxconn")
        assert left >= config.max_queue / 4

    def test_bodies_may_take_as_long_here_as_at_an_instance(self) -> None:
        assert setting("wait-for-body time") == Deadlines().body
        assert setting("timeout http-request") == Deadlines().head

    def test_two_instances_may_be_waited_for_by_two_queues(self) -> None:
        config = load_config({"INTERN_DECISION_API_TOKEN": TOKEN})
        places = 2 * setting(r"rise 1 maxconn") + setting(r"queue\(instances\) ge")
        assert places == 2 * config.max_queue


def setting(name: str) -> int:
    """The one number that follows `name` in the shipped file."""
    [number] = re.findall(rf"^[^#\n]*{name} (\d+)", CONFIGURATION.read_text(), re.M)
    return int(number)


class TestWhatPasses:
    def test_an_answer_is_the_instances_own(self, shared: Balancer) -> None:
        status, document = ask(shared.host, "/decide", BODY)
        assert status == 200
        assert document["native"]["choice"] == document["top"]
        assert document["prompt_sha256"] == "0" * 64

    def test_the_bearer_is_judged_by_the_instance(self, shared: Balancer) -> None:
        status, document, headers = ask_closely(
            shared.host, "wrong", **{"X-Request-Id": "mine"}
        )
        assert document == {
            "error": {
                "code": "unauthorized",
                "message": "missing or wrong bearer token",
            }
        }
        assert (status, headers["X-Request-Id"]) == (401, "mine")
        assert ask(shared.host, "/decide", BODY)[0] == 200
        assert TOKEN not in shared.log.read_text()

    def test_tls_ends_here(self, shared: Balancer) -> None:
        client = http.client.HTTPSConnection(
            shared.tls_host, timeout=WAIT, context=shared.trust()
        )
        with contextlib.closing(client):
            status, document = exchange(client, "/decide", BODY)
        assert (status, document["id"]) == (200, "d")

    def test_health_is_an_instances_and_metrics_nobodys(self, shared: Balancer) -> None:
        assert ask(shared.host, "/health")[1]["status"] == "ok"
        assert ask(shared.host, "/metrics") == (
            404,
            {"error": {"code": "not_found", "message": "no such path"}},
        )

    @pytest.mark.parametrize("size", [900_000, 1_048_577, 3_000_000])
    def test_the_instance_judges_a_long_body(self, shared: Balancer, size: int) -> None:
        status, document = ask(shared.host, "/decide", {**BODY, "state": "x" * size})
        code = "invalid_request" if size < 2**20 else "request_too_large"
        assert (status, document["error"]["code"]) == (
            422 if size < 2**20 else 413,
            code,
        )

    def test_a_body_on_its_way_holds_no_slot(self, shared: Balancer) -> None:
        host, port = shared.host.split(":")
        body = json.dumps(BODY).encode()
        head = (
            f"POST /decide HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((host, int(port)), WAIT) as client:
            client.sendall(head.encode() + body[:50])
            for _ in range(4):
                assert ask(shared.host, "/health")[1]["queue"]["admitted"] == 0
            client.sendall(body[50:])
            assert client.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")

    def test_an_expected_continue_is_sent(self, shared: Balancer) -> None:
        host, port = shared.host.split(":")
        body = json.dumps(BODY).encode()
        head = (
            f"POST /decide HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((host, int(port)), WAIT) as client:
            client.sendall(head.encode())
            assert client.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.sendall(body)
            assert client.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")

    def test_the_balancer_shows_its_own_metrics(self, shared: Balancer) -> None:
        text = shared.read("/metrics")
        assert 'haproxy_backend_active_servers{proxy="instances"} 2' in text
        rules = (SYSTEMD / "prometheus-rules.yml").read_text()
        asked = set(re.findall(r"\bhaproxy_\w+\{\S+\}", rules))
        assert asked
        assert {series for series in asked if series not in text} == set()


class TestInstancesThatFail:
    def test_one_that_is_killed_costs_no_client_its_answer(
        self, start: Start, tmp_path: Path
    ) -> None:
        pair = start(seconds=0.005)
        with run_balancer(tmp_path, [i.url for i in pair]) as balancer:
            held = hold_both(balancer, pair)
            pair[1].process.send_signal(RELEASE)
            with Stream(balancer.host) as stream:
                pair[0].process.kill()
                balancer.wait_for("DOWN", "UP")
                stream.wait_for(10)
            # In flight on the killed one: replayed on the other.
            assert [post.join()[0] for post in held] == [200, 200]
            assert set(stream.outcomes) == {
                (200, ask(balancer.host, "/decide", BODY)[1]["top"])
            }
            assert balancer.count("wredis") >= 1
            pair[1].process.kill()
            balancer.wait_for("DOWN", "DOWN")
            assert ask(balancer.host, "/decide", BODY) == (503, {"error": NO_INSTANCE})

    def test_one_that_is_stopped_answers_what_it_has_and_gets_no_more(
        self, start: Start, tmp_path: Path
    ) -> None:
        pair = start(seconds=0.005)
        slow = [("fastinter 250ms", "fastinter 1s")]
        with run_balancer(tmp_path, [i.url for i in pair], slow) as balancer:
            held = hold_both(balancer, pair)
            pair[1].process.send_signal(RELEASE)
            pair[0].terminate()
            wait_until(lambda: pair[0].ask("/health")[0] == 503, "stopping")
            with Stream(balancer.host) as stream:
                balancer.wait_for("DOWN", "UP")
                assert balancer.count("wretr") >= 1
                stream.wait_for(10)
                pair[0].process.send_signal(RELEASE)
                assert pair[0].wait() == 0
                stream.wait_for(10)
            assert [post.join()[0] for post in held] == [200, 200]
            assert {status for status, _ in stream.outcomes} == {200}

    def test_one_that_lost_its_engine_is_asked_once_and_left(
        self, start: Start, tmp_path: Path
    ) -> None:
        pair = start(seconds=0.005, stay_lost=True)
        with run_balancer(tmp_path, [i.url for i in pair]) as balancer:
            with Stream(balancer.host) as stream:
                pair[0].process.send_signal(LOSE)
                balancer.wait_for("DOWN", "UP")
                stream.wait_for(10)
            assert {status for status, _ in stream.outcomes} == {200}
            assert pair[0].ask("/health")[0] == 503
            assert balancer.count("wretr") >= 1

    def test_one_that_hangs_is_left(self, start: Start, tmp_path: Path) -> None:
        pair = start(seconds=0.005)
        hasty = [("timeout check 2s", "timeout check 200ms")]
        with run_balancer(tmp_path, [i.url for i in pair], hasty) as balancer:
            pair[0].process.send_signal(signal.SIGSTOP)
            balancer.wait_for("DOWN", "UP")
            with Stream(balancer.host) as stream:
                stream.wait_for(20)
            assert {status for status, _ in stream.outcomes} == {200}
            pair[0].process.send_signal(signal.SIGCONT)
            balancer.wait_for("UP", "UP")

    def test_one_whose_every_answer_is_a_500_does_not_attract_all(
        self, start: Start, tmp_path: Path
    ) -> None:
        pair = start(seconds=0.005)
        with run_balancer(tmp_path, [i.url for i in pair]) as balancer:
            pair[0].process.send_signal(BREAK)
            with Stream(balancer.host) as stream:
                stream.wait_for(200)
            told = Counter(status for status, _ in stream.outcomes.elements())
            assert set(told) == {200, 500}
            # Ten in a row, then one good check a second brings ten more.
            assert told[500] < told[200]

    def test_the_last_answer_passes_when_no_other_instance_is_left(
        self, start: Start, tmp_path: Path
    ) -> None:
        [instance] = start(1, stay_lost=True)
        unchecked = [("inter 1s fastinter 250ms", "inter 1h")]
        with run_balancer(tmp_path, [instance.url], unchecked) as balancer:
            instance.process.send_signal(LOSE)
            wait_until(lambda: instance.ask("/decide", BODY)[0] == 503, "lost")
            status, document, headers = ask_closely(balancer.host)
            assert (status, document["error"]["code"]) == (503, "engine_failed")
            # The instance says 60; the official SDK gives up when told over 30.
            assert headers["Retry-After"] == "2"

    def test_a_full_one_is_left_until_it_has_room(
        self, start: Start, tmp_path: Path
    ) -> None:
        pair = start(seconds=0.005)
        address = pair[0].url.removeprefix("http://")
        with run_balancer(tmp_path, [i.url for i in pair]) as balancer:
            places = pair[0].ask("/health")[1]["queue"]["slots_free"]
            others = [Post(address, {**BODY, "state": HOLD}) for _ in range(places)]
            balancer.wait_for("DOWN", "UP")
            assert pair[0].ask("/health")[0] == 200
            with Stream(balancer.host) as stream:
                stream.wait_for(20)
            assert {status for status, _ in stream.outcomes} == {200}
            pair[0].process.send_signal(RELEASE)
            assert {post.join()[0] for post in others} == {200}
            balancer.wait_for("UP", "UP")

    def test_what_the_balancer_cannot_replay_the_official_sdk_asks_again(
        self, start: Start, tmp_path: Path
    ) -> None:
        pytest.importorskip("typesafe_sdk")  # here: the thread below cannot skip
        pair = start(seconds=0.005)
        hasty = [
            ("retries 1\n", "retries 0\n"),
            (
                "off its answer\"}}' hdr Retry-After 3",
                "off its answer\"}}' hdr Retry-After 1",
            ),
        ]
        with run_balancer(tmp_path, [i.url for i in pair], hasty) as balancer:
            held = hold_both(balancer, pair)
            answers: list[Any] = []
            asking = threading.Thread(
                target=lambda: answers.append(ask_sdk(balancer.url, HOLD))
            )
            pair[1].process.send_signal(RELEASE)
            assert held
            asking.start()
            pair[0].process.kill()
            asking.join(WAIT)
            assert sorted(post.join()[0] for post in held) == [200, 502]
            assert [answer.answers["safe"].type for answer in answers] == ["noul"]


def ask_sdk(url: str, state: str) -> Any:
    sdk = pytest.importorskip("typesafe_sdk")
    client = sdk.TypeSafeClient(base_url=url, api_key=TOKEN, timeout=WAIT)
    with contextlib.closing(client):
        return client.system_one(state, {"safe": sdk.Noul(instructions="Is it?")})


class TestBearers:
    def test_wrong_ones_do_not_take_the_places_of_right_ones(
        self, start: Start, tmp_path: Path
    ) -> None:
        pair = start(seconds=0.005)
        with (
            run_balancer(tmp_path, [i.url for i in pair]) as balancer,
            Stream(balancer.host) as stream,
        ):
            told = Counter(ask_closely(balancer.host, "wrong")[0] for _ in range(60))
            assert set(told) == {401, 429}
            status, document, headers = ask_closely(balancer.host, "x" * 40)
            assert (status, document["error"]["code"]) == (429, "busy")
            assert headers["Retry-After"] == "10"
            stream.wait_for(20)
        assert {status for status, _ in stream.outcomes} == {200}

    def test_a_few_wrong_ones_are_judged_by_the_instance(
        self, start: Start, tmp_path: Path
    ) -> None:
        [instance] = start(1)
        with run_balancer(tmp_path, [instance.url]) as balancer:
            told = [ask_closely(balancer.host, "wrong")[0] for _ in range(10)]
            assert told == [401] * 10
            assert ask(balancer.host, "/decide", BODY)[0] == 200


class TestRequestIds:
    def test_one_is_made_where_a_client_gave_none(self, shared: Balancer) -> None:
        headers = ask_closely(shared.host)[2]
        assert re.fullmatch(r"[0-9a-f-]{36}", headers["X-Request-Id"])
        assert headers["x-typesafe-request-id"] == headers["X-Request-Id"]
        wait_until(
            lambda: headers["X-Request-Id"] in shared.log.read_text(), "it is logged"
        )

    def test_what_the_balancer_says_itself_has_the_clients_own(
        self, tmp_path: Path, start: Start
    ) -> None:
        [instance] = start(1)
        with run_balancer(tmp_path, [instance.url]) as balancer:
            instance.process.kill()
            balancer.wait_for("DOWN")
            status, _, headers = ask_closely(balancer.host, **{"X-Request-Id": "mine"})
            assert status == 503
            assert headers["X-Request-Id"] == headers["x-typesafe-request-id"] == "mine"


class TestClients:
    def test_one_that_closes_is_dropped_by_the_instance(
        self, start: Start, tmp_path: Path
    ) -> None:
        [instance] = start(1)
        with run_balancer(tmp_path, [instance.url]) as balancer:
            first = Post(balancer.host, HELD)
            wait_until(lambda: queue_of(instance)["scoring"], "a held call")
            client = http.client.HTTPConnection(balancer.host, timeout=WAIT)
            headers = {"Authorization": f"Bearer {TOKEN}"}
            client.request("POST", "/decide", json.dumps(BODY), headers)
            wait_until(lambda: queue_of(instance)["admitted"] == 2, "two admitted")
            client.close()
            wait_until(lambda: queue_of(instance)["admitted"] == 1, "one is gone")
            instance.process.send_signal(RELEASE)
            assert first.join()[0] == 200
            outcomes = instance.ask("/health")[1]["requests"]
            assert outcomes["client_gone"] == 1

    def test_too_many_are_told_so_whatever_their_body(
        self, start: Start, tmp_path: Path
    ) -> None:
        [instance] = start(1)
        few = [
            ("queue(instances) ge 16", "queue(instances) ge 2"),
            ("rise 1 maxconn 24", "rise 1 maxconn 4"),
        ]
        with run_balancer(tmp_path, [instance.url], few) as balancer:
            posts = [Post(balancer.host, HELD) for _ in range(6)]
            wait_until(lambda: balancer.count("qcur") == 2, "two wait at the balancer")
            # What was sent on may still be under way to the instance.
            wait_until(lambda: queue_of(instance)["admitted"] == 4, "four are admitted")
            for body in (BODY, HELD):
                assert ask(balancer.host, "/decide", body) == (429, {"error": BUSY})
            # Documents do not wait behind what is scored.
            assert ask(balancer.host, "/health")[1]["queue"]["admitted"] == 4
            instance.process.send_signal(RELEASE)
            assert {post.join()[0] for post in posts} == {200}

    def test_an_answer_may_take_longer_than_a_client_may_be_silent(
        self, start: Start, tmp_path: Path
    ) -> None:
        [instance] = start(1, seconds=1.0)
        short = [("timeout client 60s", "timeout client 200ms")]
        with run_balancer(tmp_path, [instance.url], short) as balancer:
            assert ask(balancer.host, "/decide", BODY)[0] == 200


@pytest.mark.torch
def test_the_sdk_notices_nothing_when_one_of_two_demos_is_killed(
    demo_checkpoint: DemoCheckpoint, demo_server: DemoServer, tmp_path: Path
) -> None:
    find_haproxy()
    killed = start_demo(Path(demo_checkpoint.path).parents[2], tmp_path / "killed")
    try:
        killed.wait_until_ready()
        with run_balancer(tmp_path, [killed.url, demo_server.url]) as balancer:
            alone = ask_sdk(demo_server.url, "s").answers
            assert ask_sdk(balancer.url, "s").answers == alone
            with Stream(balancer.host) as stream:
                killed.process.kill()
                assert ask_sdk(balancer.url, "s").answers == alone
                balancer.wait_for("DOWN", "UP")
                stream.wait_for(5)
            assert {status for status, _ in stream.outcomes} == {200}
    finally:
        end([killed])
