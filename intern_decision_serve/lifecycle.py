"""One process from start to exit: the order of startup, the signals, the stop.

    bind -> load on the inference thread -> listen -> READY -> drain -> exit status

The main thread only waits for the next event (ready, a signal, drained, lost); all work
is elsewhere. It must never serve before the last startup check passed (INV-3).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import notify
from .accesslog import AccessLog
from .activation import inherited_socket
from .admission import Admission
from .config import Config
from .errors import EXIT_ENGINE_LOST, StartupRefused
from .handlers import Api
from .health import Health
from .metrics import Metrics, Tally
from .pins import ModelPins
from .server import Server
from .worker import Worker

__all__ = ["Events", "Service", "load_on_this_thread", "run"]

_log = logging.getLogger(__name__)

GRACE_SECONDS = 30.0  # for admitted work, after SIGTERM
LOST_SECONDS = 2.0  # to answer what waits and show /health, once the engine is lost


def load_on_this_thread(config: Config, pins: ModelPins) -> Any:
    """Import and load the engine; runs on the inference thread and imports torch."""
    from .engine import load_engine

    engine = load_engine(
        pins,
        checkpoint=config.checkpoint,
        device=config.device,
        vram_cap_gib=config.vram_cap_gib,
        max_tokens=config.max_tokens,
        release_slack_mib=config.release_slack_mib,
        keep_vision=config.keep_vision,
        allow_slow_kernels=config.allow_slow_kernels,
        warmup_tokens=config.warmup_tokens,
        cuda_graphs=config.cuda_graphs,
        cuda_graphs_mib=config.cuda_graphs_mib,
        progress=report_progress,
    )
    if engine.graphs is not None:
        _warn_of_a_tight_cap(config, engine.memory()["baseline_mib"])
    return engine


def _warn_of_a_tight_cap(config: Config, baseline_mib: float | None) -> None:
    """Tell of a cap under which a full pool of graphs leaves a long call no room."""
    if config.vram_cap_gib is None or baseline_mib is None:
        return
    room_mib = config.vram_cap_gib * 1024 - baseline_mib
    if room_mib < config.release_slack_mib + config.cuda_graphs_mib:
        _log.warning(
            "INTERN_DECISION_VRAM_CAP_GIB leaves %d MiB over the baseline, less than "
            "RELEASE_SLACK_MIB and CUDA_GRAPHS_MIB together: a long call may run out "
            "of memory and drop all graphs",
            room_mib,
        )


def report_progress(text: str) -> None:
    """Say how far loading is, in the log and in `systemctl status`."""
    _log.info("%s", text)
    notify.status(text)


class Events:
    """What the main thread waits for, one word each: ready, stop, drained, lost.

    Fact: the kernel may hand a signal to any thread, and a main thread that sleeps on a
    lock does not wake for it (seen on a GPU host: SIGTERM was lost for minutes). The
    wake-up descriptor is written by whichever thread the signal meets.
    """

    def __init__(self) -> None:
        self._words: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._before = signal.set_wakeup_fd(
            self._sender.fileno(), warn_on_full_buffer=False
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.put("stop"))

    def put(self, word: str) -> None:
        """Tell the main thread; from any thread."""
        self._words.put(word)
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: ending
            self._sender.send(b"\0")

    def get(self) -> str:
        """Wait for the next word; the main thread only."""
        while True:
            try:
                return self._words.get_nowait()
            except queue.Empty:
                self._receiver.recv(4096)

    def close(self) -> None:
        """Give the wake-up descriptor back."""
        signal.set_wakeup_fd(self._before)
        self._receiver.close()
        self._sender.close()


@dataclass(frozen=True, slots=True)
class Service:
    """The parts of one process, wired together; nothing runs yet."""

    config: Config
    worker: Worker
    admission: Admission
    access_log: AccessLog
    server: Server
    api: Api

    @classmethod
    def build(
        cls,
        config: Config,
        pins: ModelPins,
        load: Callable[[], Any],
        *,
        on_lost: Callable[[], None] = lambda: None,
        inherited: socket.socket | None = None,
        **server_options: Any,
    ) -> Service:
        """Wire the parts and bind; raises OSError when the address cannot be had."""
        worker = Worker(load, on_lost=on_lost)
        admission = Admission(config.max_queue, worker.estimate_wait)
        tally = Tally()
        access_log = AccessLog(observe=tally.add)
        health = Health(config, worker, admission, access_log)
        server = Server(
            (config.host, config.port),
            token=config.api_token,
            max_body_bytes=config.max_body_bytes,
            worker=worker,
            admission=admission,
            access_log=access_log,
            inherited=inherited,
            **server_options,
        )
        api = Api(config, pins, worker, health, Metrics(tally, health))
        return cls(config, worker, admission, access_log, server, api)

    def serve(self) -> None:
        """Listen, and answer from another thread; after the last startup check."""
        self.server.server_activate()
        threading.Thread(
            target=self.server.serve, args=(self.api,), name="accept", daemon=True
        ).start()

    def close(self) -> None:
        """Accept no more; after `serve`. Idle connections end with the process."""
        self.server.shutdown()
        self.server.server_close()
        self.access_log.flush()


def run(config: Config, pins: ModelPins, announce: Callable[[str], None]) -> int:
    """Serve until told to stop; the exit status. Raises StartupRefused.

    `announce` gets the base URL once requests are answered.
    """
    events = Events()
    try:
        return _run(config, pins, announce, events)
    finally:
        events.close()


def _run(
    config: Config, pins: ModelPins, announce: Callable[[str], None], events: Events
) -> int:
    service = _bind(config, pins, events)
    service.worker.start(lambda: events.put("ready"))
    if events.get() == "stop":
        notify.stopping()
        service.server.server_close()
        return 0
    if service.worker.failure is not None:
        service.server.server_close()
        raise service.worker.failure
    service.serve()
    _feed_watchdog(service.worker)
    report_progress(f"serving {pins.name}")
    notify.ready()
    announce(service.server.url)
    try:
        return _wait_for_end(service, events)
    finally:
        service.close()


def _bind(config: Config, pins: ModelPins, events: Events) -> Service:
    try:
        return Service.build(
            config,
            pins,
            lambda: load_on_this_thread(config, pins),
            on_lost=lambda: events.put("lost"),
            inherited=inherited_socket(os.environ),
        )
    except (OSError, ValueError) as error:
        where = f"{config.host}:{config.port}"
        raise StartupRefused(f"cannot listen on {where}: {error}") from None


def _feed_watchdog(worker: Worker) -> None:
    seconds = notify.watchdog_seconds(os.environ)
    if seconds is not None:
        watchdog = notify.Watchdog(lambda: worker.running_seconds, seconds)
        never = threading.Event()
        threading.Thread(target=watchdog.run, args=(never,), daemon=True).start()


def _wait_for_end(service: Service, events: Events) -> int:
    event = events.get()
    if event == "lost":
        return _end_lost(service)
    notify.stopping()
    _log.info("stopping: %d admitted", service.admission.admitted)
    service.worker.stop()
    threading.Thread(target=_drain, args=(service, events), daemon=True).start()
    event = events.get()  # drained, a second signal, or the engine lost meanwhile
    return _end_lost(service) if event == "lost" else 0


def _drain(service: Service, events: Events) -> None:
    if not service.admission.wait_until_empty(GRACE_SECONDS):
        _log.warning("not answered in time: %d admitted", service.admission.admitted)
    events.put("drained")


def _end_lost(service: Service) -> int:
    notify.status("the engine is lost")
    threading.Event().wait(LOST_SECONDS)
    return EXIT_ENGINE_LOST
