"""The command line of `probe`: what can be asked for, and what is refused at once.

The token is never an argument: it would stand in the process list.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .wire import parse_target

__all__ = ["SECTIONS", "TOKEN_VARIABLE", "parse_options", "read_token"]

SECTIONS = (
    "control", "repeat", "orderings", "chunking", "latency", "limits", "calibration",
)  # fmt: skip
TOKEN_VARIABLE = "INTERN_DECISION_API_TOKEN"


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Read the arguments; SystemExit(2) with one line for a bad one."""
    parser = argparse.ArgumentParser(
        prog="intern-decision-serve probe",
        allow_abbrev=False,  # --token must not pass for --token-file
        description="Measure a running server from outside and write a report.",
        epilog=f"The token comes from {TOKEN_VARIABLE} or --token-file. Exit status: 0 "
        "every check holds, 1 one does not or the server differs from --expect, 2 bad "
        "usage or no server, 130 interrupted (the report is written as far as it got).",
    )
    parser.add_argument("url", type=_url, help="http://host:port of the server")
    for name, metavar, cast, default, text in _OPTIONS:
        parser.add_argument(
            name, metavar=metavar, type=cast, default=default, help=text
        )
    options = parser.parse_args(argv)
    _settle(options)
    _refuse_unused(parser, options)
    return options


def _settle(options: argparse.Namespace) -> None:
    """Without --sections: all of them, or only the expectation where one is asked."""
    if options.sections is None:
        only = options.record is not None or options.expect is not None
        options.sections = () if only else SECTIONS


# What only some sections read: asked for without them, it would be dropped in silence.
_READ_BY = {
    "compare": ("control",),
    "rows": ("control", "orderings", "calibration"),
    "wait_restart": ("repeat",),
}


def _refuse_unused(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> None:
    """SystemExit(2) for an option that no chosen section reads."""
    for name, readers in _READ_BY.items():
        if getattr(options, name) is not None and not set(readers) & set(
            options.sections
        ):
            option = "--" + name.replace("_", "-")
            parser.error(f"{option} needs {' or '.join(readers)} among the sections")


def _url(text: str) -> str:
    try:
        parse_target(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _sections(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"{text!r}: sections are {', '.join(SECTIONS)}"
        )
    return tuple(name for name in SECTIONS if name in names)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds over 0")
    return value


def read_token(options: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """The token from its one source; ValueError says what is wrong, never the token."""
    path: Path | None = options.token_file
    told = environ.get(TOKEN_VARIABLE)
    if path is not None and told is not None:
        raise ValueError(f"{TOKEN_VARIABLE} and --token-file are both set")
    if path is not None:
        told = path.read_text("utf-8", "replace").removesuffix("\n")
    if not told:
        raise ValueError(f"no token: set {TOKEN_VARIABLE} or give --token-file")
    if not all(33 <= ord(letter) <= 126 for letter in told):
        raise ValueError("the token holds other than visible ASCII characters")
    return told


# Name, placeholder, cast, default, help.
_OPTIONS: tuple[tuple[str, str, Callable[[str], object], object, str], ...] = (
    ("--token-file", "FILE", Path, None, "file that holds the token"),
    ("--sections", "A,B", _sections, None, f"which to run: {','.join(SECTIONS)}"),
    ("--rows", "FILE", Path, None, "JSONL: id, state, question, options, label"),
    ("--out", "STEM", Path, Path("probe-report"), "writes STEM.md, .json and .html"),
    ("--compare", "FILE", Path, None, "an earlier run's JSON report"),
    ("--record", "FILE", Path, None, "write what to expect of this server"),
    ("--expect", "FILE", Path, None, "compare the server with a recorded file"),
    ("--client", "NAME", str, "", "where this runs, for the report"),
    ("--seconds", "S", _positive, 70.0, "time for latency samples (70)"),
    ("--samples", "N", _count, 100, "most samples a point and client (100)"),
    ("--repeats", "N", _count, 5, "times the fixed questions are asked (5)"),
    ("--deadline", "S", _positive, 120.0, "deadline of one request (120)"),
    ("--wait-restart", "S", _positive, None, "`repeat` waits so long for a restart"),
    ("--max-queue", "N", _count, None, "MAX_QUEUE, where /health does not show it"),
    ("--max-body-bytes", "N", _count, None, "MAX_BODY_BYTES, where not 1 MiB"),
)
