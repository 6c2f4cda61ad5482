"""Measures replay of CUDA graphs on a real GPU, with a checkpoint of the 4B's size.

    PYTHONPATH=. python tests/gpu/replay.py exact restart      [--out FOLDER]
    PYTHONPATH=. python tests/gpu/replay.py speed memory floods

Each of these ends within eight minutes on an H200. A section runs in a process of its
own and writes FOLDER/replay_SECTION.json; a short table of all of them comes last. With
`--device cpu --size tiny` the scripts can be tried out without a GPU (nothing is
replayed then, and the numbers mean nothing). Sections:

    exact     500 requests over 40 recurring shapes, all endpoints, against eager calls;
              again while shapes are evicted, after an OOM, after a broken capture
    restart   the first 120 of them in a fresh process: equal again, the same answers
    speed     medians through HTTP with and without, shapes seen once, 24 orderings, and
              predict() by length
    memory    200 shapes under the default bounds and under a narrow one
    floods    a replayed call beside refused requests, against the same stream alone
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replay_sections import (
    measure_exact,
    measure_floods,
    measure_memory,
    measure_restart,
    measure_speed,
)
from served import Options

SECTIONS: dict[str, Callable[[Options], dict[str, Any]]] = {
    "exact": measure_exact,
    "restart": measure_restart,
    "speed": measure_speed,
    "memory": measure_memory,
    "floods": measure_floods,
}
SECTION_SECONDS = 420.0


def main() -> int:
    """Run the sections asked for; 0 when each of them ended well."""
    arguments = _parse()
    options = Options(arguments.dir, arguments.size, arguments.device)
    if arguments.inside:
        result = SECTIONS[arguments.inside](options)
        path = arguments.out / f"replay_{arguments.inside}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    _make(options)
    failed = [name for name in arguments.sections if not _run(name, arguments)]
    _say("")
    for name in SECTIONS:
        path = arguments.out / f"replay_{name}.json"
        if path.exists():
            _tabulate(name, json.loads(path.read_text()))
    _say(f"failed: {', '.join(failed)}" if failed else "every section ended well")
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sections", nargs="*", default=list(SECTIONS))
    parser.add_argument("--dir", type=Path, default=Path("/tmp/gpu-demo"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--size", default="4b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = set(arguments.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    return arguments


def _run(name: str, arguments: argparse.Namespace) -> bool:
    command = [sys.executable, __file__, "--inside", name, "--out", arguments.out]
    command += ["--dir", arguments.dir, "--size", arguments.size]
    command += ["--device", arguments.device]
    environ = {**os.environ, "TRITON_CACHE_DIR": str(arguments.dir / "triton")}
    started = time.perf_counter()
    try:
        status: int | str = subprocess.run(
            [str(part) for part in command], env=environ, timeout=SECTION_SECONDS
        ).returncode
    except subprocess.TimeoutExpired:
        status = "timeout"
    _say(f"section {name}: status {status}, {time.perf_counter() - started:.1f} s")
    return status == 0


def _make(options: Options) -> None:
    """Make the checkpoint in a process that ends, with its memory on the card."""
    command = [sys.executable, "-m", "intern_decision_serve.demo"]
    command += [str(options.directory), options.size, options.device]
    started = time.perf_counter()
    subprocess.run(command, check=True)
    _say(f"checkpoint: {time.perf_counter() - started:.1f} s")


def _tabulate(section: str, result: dict[str, Any]) -> None:
    for name, value in result.items():
        for row in value if isinstance(value, list) else [value]:
            if isinstance(row, dict):
                row = " ".join(f"{key}={item}" for key, item in row.items())
            _say(f"{section:8} {name:14} {row}"[:400])


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
