"""Measures the engine on a real GPU with a random checkpoint of the 4B's size.

    PYTHONPATH=. python tests/gpu/measure.py cold kept answers [--out FOLDER]
    PYTHONPATH=. python tests/gpu/measure.py service over_cap kernels lost

Each of these ends within ten minutes on an H200. A section runs in a process of its own
and writes FOLDER/SECTION.json; a short table of all of them comes last. With
`--device cpu --size tiny` the scripts can be tried out without a GPU: those numbers
mean nothing. Sections, in order:

    cold      load and warm up with an empty Triton cache, first requests, answers
    kept      the same again with the cache that `cold` filled; answers must be equal
    bare      an empty cache and no ladder: what clients would wait for without it
    answers   HTTP against direct predict(), repeats, before and after the tower swap
    service   latency shapes, throughput against the bare loop, 1,000-request soak
    over_cap  50 over-cap requests: 503, memory back, next request 200
    kernels   fla hidden: refused; with the switch: served
    lost      a device-side assert: 503, exit status 70
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import measure_kernels, measure_lost, measure_over_cap
from served import Options
from served_sections import measure_answers, measure_service
from startup import measure_startup

SECTIONS: dict[str, Callable[[Options], dict[str, Any]]] = {
    "cold": measure_startup,
    "kept": measure_startup,
    "bare": lambda options: measure_startup(options, with_ladder=False),
    "answers": measure_answers,
    "service": measure_service,
    "over_cap": measure_over_cap,
    "kernels": measure_kernels,
    "lost": measure_lost,
}
DEFAULT = tuple(name for name in SECTIONS if name != "bare")
SECTION_SECONDS = 420.0


def main() -> int:
    """Run the sections asked for; 0 when each of them ended well."""
    arguments = _parse()
    options = Options(arguments.dir, arguments.size, arguments.device)
    if arguments.inside:
        result = SECTIONS[arguments.inside](options)
        (arguments.out / f"{arguments.inside}.json").write_text(_dump(result))
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    _make(options)
    failed = [name for name in arguments.sections if not _run(name, arguments)]
    results = {
        path.stem: json.loads(path.read_text())
        for path in sorted(arguments.out.glob("*.json"))
    }
    _say("\n" + "\n".join(_tabulate(results)))
    _say(f"failed: {', '.join(failed)}" if failed else "every section ended well")
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sections", nargs="*", default=list(DEFAULT))
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
    """Run one section in a process of its own, with the Triton cache it is to have."""
    cache = arguments.dir / ("triton-bare" if name == "bare" else "triton")
    if name in ("cold", "bare"):
        shutil.rmtree(cache, ignore_errors=True)
    command = [sys.executable, __file__, "--inside", name, "--out", arguments.out]
    command += ["--dir", arguments.dir, "--size", arguments.size]
    command += ["--device", arguments.device]
    environ = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
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
    code = (
        "import sys, pathlib; from intern_decision_serve.demo import make_checkpoint;"
        "make_checkpoint(pathlib.Path(sys.argv[1]), size=sys.argv[2],"
        " device=sys.argv[3])"
    )
    command = [sys.executable, "-c", code, str(options.directory)]
    started = time.perf_counter()
    subprocess.run([*command, options.size, options.device], check=True)
    _say(f"checkpoint: {time.perf_counter() - started:.1f} s")


def _tabulate(results: dict[str, Any]) -> list[str]:
    """One line per figure: section, name, value; lists of rows one line each."""
    lines = []
    for section, result in results.items():
        for name, value in result.items():
            if name in ("kernels", "warmup", "stages"):
                continue
            rows = value if isinstance(value, list) else [value]
            lines += [f"{section:9} {name:28} {_short(row)}" for row in rows]
    return lines


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={_short(item)}" for name, item in value.items())[:400]
    return str(value)[:200]


def _dump(result: dict[str, Any]) -> str:
    return json.dumps(result, indent=1) + "\n"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
