"""Starts the processes of a measurement and reads what they say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .generators import Load

__all__ = ["Process", "Running", "start_load"]

ROOT = Path(__file__).parents[2]


def _start(module: str, arguments: list[str], log: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with log.open("wb") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", f"tests.bench.{module}", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )


class Process:
    """A server process that printed its URL; ends with the `with` block."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="bench-")
        self._log = Path(self._directory.name) / "stderr"
        self._process = _start(module, list(arguments), self._log)
        self.url: str = self._read()["url"]

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(self._log.read_text()[-3000:])
        return json.loads(line)

    def tell(self, **command: Any) -> Any:
        """Send one command; its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._directory.cleanup()

    @property
    def cpu_seconds(self) -> float:
        """User and system time of the process so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2]
        ticks = sum(map(int, fields.split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")


class Running:
    """A load that was started; `finish` waits for it and gives what it did."""

    def __init__(self, url: str, load: Load) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="bench-")
        log = Path(self._directory.name) / "stderr"
        self._process = _start("generators", [load.to_json(url)], log)

    def pause(self) -> None:
        """Stop the process where it is; its connections stay open."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Tell it that it has sent enough."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, whatever it does; after `finish` too."""
        self._process.kill()
        self._process.wait()
        self._directory.cleanup()

    def finish(self) -> dict[str, Any]:
        """Its counts, once it ended."""
        output, _ = self._process.communicate(timeout=90)
        result: dict[str, Any] = json.loads(output)
        return result


def start_load(url: str, load: Load) -> Running:
    """Start a load in a process of its own."""
    return Running(url, load)
