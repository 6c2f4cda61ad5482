"""Runs sections of measurements, each in a process of its own, and tabulates them.

A script names its sections and calls `main`; the same script, told `--inside NAME`,
measures that one and writes its result where the outer process finds it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from served import Options

__all__ = ["Sections", "add_options", "make_checkpoint", "run_sections", "say"]

SECTION_SECONDS = 420.0

Result = dict[str, Any]
Sections = Mapping[str, Callable[[Options], Result]]


def run_sections(
    script: str,
    sections: Sections,
    *,
    default: Sequence[str] = (),
    caches: Mapping[str, str] | None = None,
    cold: Collection[str] = (),
    hidden: Collection[str] = (),
) -> int:
    """Run the sections asked for; 0 when each of them ended well.

    `caches` names the Triton cache of a section that does not share `triton`; `cold`
    are those that find theirs empty; `hidden` are keys of a result left out of the
    table.
    """
    options, arguments = _parse(sections, default or list(sections))
    if arguments.inside:
        result = sections[arguments.inside](options)
        path = arguments.out / f"{arguments.inside}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    make_checkpoint(options)
    failed = []
    for name in arguments.sections:
        cache = options.directory / (caches or {}).get(name, "triton")
        if name in cold:
            shutil.rmtree(cache, ignore_errors=True)
        if not _run(script, name, arguments, cache):
            failed.append(name)
    say("")
    for name in sections:
        path = arguments.out / f"{name}.json"
        if path.exists():
            _tabulate(name, json.loads(path.read_text()), hidden)
    say(f"failed: {', '.join(failed)}" if failed else "every section ended well")
    return 1 if failed else 0


def make_checkpoint(options: Options) -> None:
    """Make the checkpoint in a process that ends, with its memory on the card."""
    command = [sys.executable, "-m", "intern_decision_serve.demo"]
    command += [str(options.directory), options.size, options.device]
    started = time.perf_counter()
    subprocess.run(command, check=True)
    say(f"checkpoint: {time.perf_counter() - started:.1f} s")


def say(text: str) -> None:
    """Print a line at once: what is measured survives a command that is cut short."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that every script here has."""
    parser.add_argument("--dir", type=Path, default=Path("/tmp/gpu-demo"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--size", default="4b")
    parser.add_argument("--device", default="cuda")


def _parse(
    sections: Sections, default: Sequence[str]
) -> tuple[Options, argparse.Namespace]:
    parser = argparse.ArgumentParser()
    parser.add_argument("sections", nargs="*", default=default)
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    add_options(parser)
    arguments = parser.parse_args()
    unknown = set(arguments.sections) - set(sections)
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    return Options(arguments.dir, arguments.size, arguments.device), arguments


def _run(script: str, name: str, arguments: argparse.Namespace, cache: Path) -> bool:
    """Run one section in a process of its own, with the Triton cache it is to have."""
    command = [sys.executable, script, "--inside", name, "--out", arguments.out]
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
    say(f"section {name}: status {status}, {time.perf_counter() - started:.1f} s")
    return status == 0


def _tabulate(section: str, result: Result, hidden: Collection[str]) -> None:
    """One line per figure: section, name, value; lists of rows one line each."""
    for name, value in result.items():
        if name in hidden:
            continue
        for row in value if isinstance(value, list) else [value]:
            say(f"{section:9} {name:28} {_short(row)}"[:440])


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={_short(item)}" for name, item in value.items())
    return str(value)
