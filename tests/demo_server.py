"""Runs the demo, or any subcommand, as a process of its own and stops it again."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import intern_decision_serve

__all__ = [
    "TOKEN",
    "DemoServer",
    "exchange",
    "make_environ",
    "run_command",
    "start_demo",
]

TOKEN = "demo-token-of-at-least-32-characters"
START_SECONDS = 120.0  # a loaded machine imports torch slowly
STOP_SECONDS = 60.0
_READY = re.compile(r"(http://\S+)")


def make_environ(**settings: str) -> dict[str, str]:
    """This process's environment without its settings, plus `settings`, one thread."""
    prefix = "INTERN_DECISION_"
    clean = {name: v for name, v in os.environ.items() if not name.startswith(prefix)}
    root = Path(intern_decision_serve.__file__).parents[1]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    ours = {prefix + name: value for name, value in settings.items()}
    # One thread: the arithmetic of a call must not depend on the machine's cores.
    return {**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **ours}


def run_command(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a subcommand that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "intern_decision_serve", *arguments],
        env=make_environ(**settings),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )


@dataclass(slots=True)
class DemoServer:
    """A demo process; `url` is empty until it is ready. Its stderr is `log`."""

    process: subprocess.Popen[bytes]
    log: Path
    out: Path
    token: str = TOKEN
    url: str = ""

    def wait_for_log(self, text: str) -> None:
        """Block until the log holds `text`; fails when the process ends first."""
        self._wait(lambda: text in self.log.read_text(), f"{text!r} in the log")

    def wait_until_ready(self) -> None:
        """Block until the demo printed its URL, which is when it answers."""
        self._wait(lambda: _READY.search(self.out.read_text()), "the URL")
        match = _READY.search(self.out.read_text())
        assert match is not None
        self.url = match[1]

    def _wait(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            ended, late = self.process.poll(), time.monotonic() > deadline
            if ended is not None or late:
                self.process.kill()
                raise AssertionError(
                    f"no {what}; status {ended}\n{self.log.read_text()}"
                )
            time.sleep(0.02)

    def connect(self) -> http.client.HTTPConnection:
        """A new connection, not opened yet."""
        address = urlsplit(self.url)
        return http.client.HTTPConnection(address.hostname, address.port, timeout=60)

    def ask(self, path: str, body: object = None) -> tuple[int, Any]:
        """GET, or POST `body` with the token; the status and the JSON answer."""
        connection = self.connect()
        try:
            return exchange(connection, path, body)
        finally:
            connection.close()

    def terminate(self) -> None:
        """Send SIGTERM and return."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """The exit status, once it ended."""
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.terminate()
        return self.wait()


def exchange(
    connection: http.client.HTTPConnection, path: str, body: object = None
) -> tuple[int, Any]:
    """One request on an open connection; the status and the JSON answer."""
    if body is None:
        connection.request("GET", path)
    else:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        connection.request("POST", path, json.dumps(body).encode(), headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def start_demo(directory: Path, logs: Path, **settings: str) -> DemoServer:
    """Start the demo on a free port over the checkpoint in `directory`."""
    logs.mkdir(parents=True, exist_ok=True)
    log, out = logs / "stderr", logs / "stdout"
    arguments = ["demo", "--port", "0", "--dir", str(directory)]
    with log.open("wb") as stderr, out.open("wb") as stdout:
        process = subprocess.Popen(
            [sys.executable, "-m", "intern_decision_serve", *arguments],
            env=make_environ(API_TOKEN=TOKEN, **settings),
            stdout=stdout,
            stderr=stderr,
        )
    return DemoServer(process, log, out)
