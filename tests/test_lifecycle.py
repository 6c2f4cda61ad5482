"""One process from start to exit: the order of startup, the signals, the statuses."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import fake_predict

from intern_decision_serve import engine, lifecycle
from intern_decision_serve.config import Config, load_config
from intern_decision_serve.errors import (
    EXIT_ENGINE_LOST,
    DeviceAbsent,
    EngineFailed,
    StartupRefused,
)
from intern_decision_serve.pins import FAMILY

PINS = FAMILY["Intern-Decision-4B"]
TOKEN = "t" * 40
BODY = json.dumps(
    {
        "state": "s",
        "id": "d",
        "question": "q",
        "options": [{"id": "a", "description": ""}, {"id": "b", "description": ""}],
    }
)
WAIT = 20  # seconds until a test that hangs fails; nothing waits so long when well


class Engine:
    """Scores at once, or when `go` is set; fails with `failure`."""

    description: dict[str, Any] = {}
    kernels: dict[str, Any] = {}
    warmup: dict[str, Any] = {}
    graphs = None
    longest_token = 100

    def __init__(self, failure: Exception | None = None) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()
        self.go.set()
        self.failure = failure

    def score(self, request: Any, prepared: Any = None) -> tuple[dict[str, Any], str]:
        self.entered.set()
        assert self.go.wait(WAIT)
        if self.failure is not None:
            raise self.failure
        return fake_predict(request), "0" * 64

    def memory(self) -> dict[str, Any]:
        return {}


@pytest.fixture(autouse=True)
def _signals_are_given_back() -> Iterator[None]:
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def config() -> Config:
    environ = {"INTERN_DECISION_API_TOKEN": TOKEN, "INTERN_DECISION_PORT": "0"}
    return load_config(environ)


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A datagram socket in systemd's part."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(WAIT)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def load(monkeypatch: pytest.MonkeyPatch, loader: Callable[[], Any]) -> None:
    monkeypatch.setattr(lifecycle, "load_on_this_thread", lambda *_: loader())


class Client:
    """One POST from its own thread; `status` and `body` once `join`ed."""

    def __init__(self, url: str) -> None:
        self.connection = http.client.HTTPConnection(url.split("//")[1], timeout=WAIT)
        self.status = 0
        self.document: Any = None
        self._thread = threading.Thread(target=self._post)
        self._thread.start()

    def _post(self) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        self.connection.request("POST", "/decide", BODY, headers)
        try:
            answer = self.connection.getresponse()
            self.status, self.document = answer.status, json.loads(answer.read())
        finally:
            self.connection.close()

    def join(self) -> None:
        self._thread.join(WAIT)

    @property
    def is_waiting(self) -> bool:
        return self._thread.is_alive()


def test_every_setting_of_the_engine_reaches_it(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "checkpoint": "/elsewhere",
        "device": "cuda:1",
        "vram_cap_gib": 9.5,
        "max_tokens": 4000,
        "release_slack_mib": 7,
        "keep_vision": True,
        "allow_slow_kernels": True,
        "warmup_tokens": (256, 512),
        "cuda_graphs": 3,
        "cuda_graphs_mib": 99,
    }
    loaded: list[dict[str, Any]] = []

    def load_engine(pins: Any, **given: Any) -> Engine:
        loaded.append({"": pins} | given)
        return Engine()

    monkeypatch.setattr(engine, "load_engine", load_engine)
    lifecycle.load_on_this_thread(replace(config, **changes), PINS)
    assert loaded == [{"": PINS, "progress": lifecycle.report_progress} | changes]


@pytest.mark.parametrize(
    ("cap", "baseline", "graphs", "is_told"),
    [
        (2.0, 1024.0 - 512.0, {"most": 4}, False),
        (2.0, 1024.0 - 511.0, {"most": 4}, True),
        (2.0, 1024.0, None, False),
        (None, 1024.0, {"most": 4}, False),
        (2.0, None, {"most": 4}, False),
    ],
)
def test_a_cap_without_room_for_the_graphs_is_told_where_replay_is_on(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cap: float | None,
    baseline: float | None,
    graphs: dict[str, Any] | None,
    is_told: bool,
) -> None:
    loaded = Engine()
    monkeypatch.setattr(loaded, "graphs", graphs)
    monkeypatch.setattr(loaded, "memory", lambda: {"baseline_mib": baseline})
    monkeypatch.setattr(engine, "load_engine", lambda pins, **given: loaded)
    bounds = {"release_slack_mib": 512, "cuda_graphs_mib": 1024}
    lifecycle.load_on_this_thread(replace(config, vram_cap_gib=cap, **bounds), PINS)
    assert any("VRAM_CAP_GIB" in line for line in caplog.messages) is is_told
    if is_told:
        assert "leaves 1535 MiB over the baseline" in caplog.text


def test_sigterm_while_idle_exits_0(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(monkeypatch, Engine)
    assert lifecycle.run(config, PINS, lambda url: terminate()) == 0


def test_sigterm_during_load_exits_0_without_serving(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def loader() -> Any:
        terminate()
        assert go.wait(WAIT)
        return Engine()

    load(monkeypatch, loader)
    announced: list[str] = []
    assert lifecycle.run(config, PINS, announced.append) == 0
    assert announced == []
    go.set()


def test_sigterm_during_a_call_answers_it_and_refuses_new_work(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    engine.go.clear()
    load(monkeypatch, lambda: engine)
    clients: list[Client] = []

    def follow(url: str) -> None:
        clients.append(Client(url))
        assert engine.entered.wait(WAIT)
        terminate()
        while _health(url)["status"] != "stopping":
            pass
        clients.append(Client(url))
        clients[1].join()
        engine.go.set()

    announce, finish = _in_a_thread(follow)
    assert lifecycle.run(config, PINS, announce) == 0
    finish()
    clients[0].join()
    assert [client.status for client in clients] == [200, 503]
    assert clients[1].document["error"]["code"] == "shutting_down"


def test_a_second_sigterm_does_not_wait_for_the_call(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    engine.go.clear()
    load(monkeypatch, lambda: engine)
    clients: list[Client] = []

    def follow(url: str) -> None:
        clients.append(Client(url))
        assert engine.entered.wait(WAIT)
        terminate()
        while _health(url)["status"] != "stopping":
            pass
        terminate()

    announce, finish = _in_a_thread(follow)
    assert lifecycle.run(config, PINS, announce) == 0
    assert not engine.go.is_set()
    engine.go.set()
    finish()
    clients[0].join()


def test_a_lost_engine_answers_503_and_exits_70(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(monkeypatch, lambda: Engine(EngineFailed("the engine is lost")))
    clients: list[Client] = []

    def follow(url: str) -> None:
        clients.append(Client(url))
        clients[0].join()

    announce, finish = _in_a_thread(follow)
    assert lifecycle.run(config, PINS, announce) == EXIT_ENGINE_LOST
    finish()
    assert clients[0].status == 503
    assert clients[0].document["error"]["code"] == "engine_failed"


def test_an_engine_lost_while_stopping_exits_70(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(EngineFailed("the engine is lost"))
    engine.go.clear()
    load(monkeypatch, lambda: engine)
    clients: list[Client] = []

    def follow(url: str) -> None:
        clients.append(Client(url))
        assert engine.entered.wait(WAIT)
        terminate()
        while _health(url)["status"] != "stopping":
            pass
        engine.go.set()
        clients[0].join()

    announce, finish = _in_a_thread(follow)
    assert lifecycle.run(config, PINS, announce) == EXIT_ENGINE_LOST
    finish()
    assert clients[0].status == 503


def test_a_call_that_never_ends_is_waited_for_only_so_long(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    engine.go.clear()
    load(monkeypatch, lambda: engine)
    monkeypatch.setattr(lifecycle, "GRACE_SECONDS", 0.0)
    clients: list[Client] = []

    def follow(url: str) -> None:
        clients.append(Client(url))
        assert engine.entered.wait(WAIT)
        terminate()

    announce, finish = _in_a_thread(follow)
    assert lifecycle.run(config, PINS, announce) == 0
    assert clients[0].is_waiting
    finish()
    engine.go.set()
    clients[0].join()
    assert clients[0].status == 200


@pytest.mark.parametrize("refusal", [StartupRefused("no"), DeviceAbsent("no")])
def test_a_refused_load_is_raised_with_its_exit_status(
    refusal: StartupRefused, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loader() -> Any:
        raise refusal

    load(monkeypatch, loader)
    with pytest.raises(StartupRefused) as raised:
        lifecycle.run(config, PINS, lambda url: None)
    assert raised.value is refusal


def test_a_taken_port_is_told_before_anything_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loader() -> Any:
        raise AssertionError("loaded")

    load(monkeypatch, loader)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environ = {
            "INTERN_DECISION_API_TOKEN": TOKEN,
            "INTERN_DECISION_PORT": str(port),
        }
        with pytest.raises(StartupRefused, match=f"cannot listen on 127.0.0.1:{port}"):
            lifecycle.run(load_config(environ), PINS, lambda url: None)


def test_nothing_listens_before_the_last_startup_check(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bound, so that a taken port is told, but not listening: a connect is refused."""
    seen: list[int] = []
    built = lifecycle.Service.build

    def build(*args: Any, **options: Any) -> Any:
        service = built(*args, **options)
        addresses.append(service.server.server_address)
        return service

    addresses: list[Any] = []
    monkeypatch.setattr(lifecycle.Service, "build", build)

    def loader() -> Any:
        with socket.socket() as client:
            seen.append(client.connect_ex(addresses[0]))
        return Engine()

    load(monkeypatch, loader)
    assert lifecycle.run(config, PINS, lambda url: terminate()) == 0
    assert seen != [0]


def test_ready_is_told_once_requests_are_answered(
    config: Config, manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loader() -> Any:
        lifecycle.report_progress("loading the weights")
        return Engine()

    load(monkeypatch, loader)

    def announce(url: str) -> None:
        assert _health(url)["status"] == "ok"
        terminate()

    assert lifecycle.run(config, PINS, announce) == 0
    told = [manager.recv(4096) for _ in range(4)]
    assert told == [
        b"STATUS=loading the weights",
        b"STATUS=serving Intern-Decision-4B",
        b"READY=1",
        b"STOPPING=1",
    ]


def _health(url: str) -> Any:
    connection = http.client.HTTPConnection(url.split("//")[1], timeout=WAIT)
    connection.request("GET", "/health")
    document = json.loads(connection.getresponse().read())
    connection.close()
    return document


def _in_a_thread(
    follow: Callable[[str], None],
) -> tuple[Callable[[str], None], Callable[[], None]]:
    """An announce that lets `run` go on, and a wait for what `follow` met."""
    failures: list[BaseException] = []
    threads: list[threading.Thread] = []

    def guarded(url: str) -> None:
        try:
            follow(url)
        except BaseException as failure:
            failures.append(failure)
            terminate()

    def announce(url: str) -> None:
        threads.append(threading.Thread(target=guarded, args=(url,)))
        threads[0].start()

    def finish() -> None:
        threads[0].join(WAIT)
        assert failures == []

    return announce, finish


def test_a_signal_that_another_thread_meets_still_stops_the_service(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may choose any thread, and the main one sleeps on."""
    load(monkeypatch, Engine)

    def follow(url: str) -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    announce, finish = _in_a_thread(follow)
    assert lifecycle.run(config, PINS, announce) == 0
    finish()
