"""Runs the whole probe against a server with a checkpoint of the 4B's size.

    PYTHONPATH=. python tests/gpu/probed.py [whole] [capped] [--out FOLDER]

whole     records what to expect, runs every section with a restart in the middle, then
          compares the restarted server with the record: FOLDER/probe-report.*
capped    asks `limits` of a server under a narrow VRAM cap: FOLDER/probe-capped.*

0 when every check passed. With `whole --device cpu --size tiny` it can be tried out
without a GPU.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from demos import TOKEN, DemoServer, make_environ, start_instance
from faults import find_narrow_cap
from sections import add_options, make_checkpoint, say
from served import Options

RESTART_LINE = "restart the server now"


def main() -> int:
    """Run the steps asked for; 1 when any command of theirs did not end with 0."""
    arguments = _parse()
    options = Options(arguments.dir, arguments.size, arguments.device)
    arguments.out.mkdir(parents=True, exist_ok=True)
    make_checkpoint(options)
    statuses: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        for step in arguments.steps:
            statuses |= STEPS[step](arguments, options, logs)
    say(f"exit statuses: {statuses}")
    return int(any(statuses.values()))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("steps", nargs="*", default=list(STEPS))
    parser.add_argument("--seconds", default="70", help="time for latency samples")
    parser.add_argument("--client", default="", help="where this runs, for the report")
    add_options(parser)
    arguments = parser.parse_args()
    unknown = set(arguments.steps) - set(STEPS)
    if unknown:
        parser.error(f"no such step: {', '.join(sorted(unknown))}")
    return arguments


def _probe_whole(
    arguments: argparse.Namespace, options: Options, logs: Path
) -> dict[str, int]:
    """Record, all sections across a restart, then compare with the record."""
    port, expected = _find_port(), logs / "expected.json"
    aside = ("--out", str(logs / "aside"))
    server = _start(options, logs, "first", port)
    try:
        record = _run(server.url, "--record", str(expected), *aside)
        process = subprocess.Popen(
            _command(
                server.url,
                *("--out", str(arguments.out / "probe-report")),
                *("--seconds", arguments.seconds, "--wait-restart", "400"),
                *(("--client", arguments.client) if arguments.client else ()),
            ),
            env=_environ(),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            say(line.rstrip())
            if RESTART_LINE in line:
                say(f"stopped with {server.stop()}")
                server = _start(options, logs, "second", port)
        every = process.wait()
        again = _run(server.url, "--expect", str(expected), *aside)
    finally:
        server.process.kill()
        server.process.wait()
    return {"record": record, "every section": every, "expect": again}


def _probe_capped(
    arguments: argparse.Namespace, options: Options, logs: Path
) -> dict[str, int]:
    """`limits` where the largest legal call is over the cap."""
    settings = {"VRAM_CAP_GIB": str(find_narrow_cap(options)), "MAX_TOKENS": "16384"}
    server = _start(options, logs, "capped", 0, WARMUP_TOKENS="256", **settings)
    try:
        out = str(arguments.out / "probe-capped")
        status = _run(server.url, "--sections", "limits", "--out", out)
    finally:
        server.process.kill()
        server.process.wait()
    return {"capped": status}


STEPS = {"whole": _probe_whole, "capped": _probe_capped}


def _start(
    options: Options, logs: Path, name: str, port: int, **settings: str
) -> DemoServer:
    started = time.monotonic()
    server = start_instance(options, logs, name, port=port, **settings)
    server.wait_until_ready()
    say(f"{name} server: ready after {time.monotonic() - started:.0f} s")
    return server


def _find_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _command(url: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "intern_decision_serve", "probe", url, *arguments]


def _environ() -> dict[str, str]:
    return make_environ(API_TOKEN=TOKEN)


def _run(url: str, *arguments: str) -> int:
    started = time.monotonic()
    done = subprocess.run(_command(url, *arguments), env=_environ())
    say(f"{arguments[:2]}: {done.returncode}, {time.monotonic() - started:.0f} s")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
