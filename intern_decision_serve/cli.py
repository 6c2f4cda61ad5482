"""The command line: subcommands, exit statuses, the offline environment first.

    serve (default) | check [--deep] | demo [--port N] [--dir D] | probe URL | --version

Importing it loads no torch. It must never print a token it did not make.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from . import __version__, lifecycle
from .auth import check_token_strength, make_token
from .config import (
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    Config,
    load_config,
    unknown_settings,
)
from .errors import EXIT_REFUSED, StartupRefused

__all__ = ["entry", "main"]

_log = logging.getLogger(__name__)

_OPTIONS = [
    {"id": "allow", "description": "harmless and reversible"},
    {"id": "ask", "description": "needs a person"},
    {"id": "deny", "description": "destroys data"},
]
_DECISION = {"id": "gate", "question": "What happens?", "options": _OPTIONS}
EXAMPLES: dict[str, dict[str, object]] = {
    "/decide": {"state": {"command": "rm -rf build"}, **_DECISION},
    "/decide/shared": {
        "state": {"command": "rm -rf build"},
        "decisions": [_DECISION, {**_DECISION, "id": "again", "orderings": "all"}],
    },
    "/v1/systemone": {
        "state": {"command": "rm -rf build"},
        "questions": {
            "safe": {"type": "noul", "instructions": "Is this reversible?"},
            "risk": {"type": "score", "instructions": "Risk?", "criteria": [0, 1, 2]},
        },
    },
}

# INV-5. Hub kernels would be unpinned remote code (decisions, Execution).
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "USE_HUB_KERNELS": "0"}


# Where a shell that has the demo's settings finds a token that was not made here.
_PLACES = {
    TOKEN_VARIABLE: f"${TOKEN_VARIABLE}",
    TOKEN_FILE_VARIABLE: f'$(cat "${TOKEN_FILE_VARIABLE}")',
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; its exit status."""
    os.environ.update(OFFLINE)
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["probe"]:
        from .probe import main as probe

        return probe(arguments[1:])
    options = _parser().parse_args(arguments)
    _configure_logging()
    commands = {"serve": _serve, "check": _check, "demo": _demo, None: _serve}
    try:
        return commands[options.command](options)
    except StartupRefused as refusal:
        _complain(refusal)
        return refusal.exit_status
    except ValueError as error:
        _complain(error)
        return EXIT_REFUSED


def entry() -> NoReturn:
    """Run and leave at once: no interpreter can unwind a call that torch is in."""
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="intern-decision-serve",
        description="Typed decisions with calibrated probabilities, over HTTP.",
        epilog="Settings are INTERN_DECISION_* environment variables (see the README).",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("serve", help="load the pinned checkpoint and serve it")
    check = commands.add_parser("check", help="verify all that needs no weights loaded")
    check.add_argument("--deep", action="store_true", help="hash the weights too")
    demo = commands.add_parser("demo", help="make a tiny random checkpoint, serve it")
    demo.add_argument("--port", type=int, help="default: INTERN_DECISION_PORT or 8100")
    demo.add_argument("--dir", type=Path, help="where the checkpoint is kept")
    demo.add_argument("--size", default="tiny", help="tiny, or 4b for a GPU")
    commands.add_parser("probe", help="measure a running server", add_help=False)
    return parser


def _complain(error: BaseException) -> None:
    """One line, whatever the error holds."""
    sys.stderr.write(f"intern-decision-serve: {' '.join(str(error).split())}\n")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _configure_logging() -> None:
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="time=%(asctime)s.%(msecs)03dZ level=%(levelname)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)


def _load_config(environ: Mapping[str, str]) -> Config:
    """The settings, with the token judged and unknown names warned about."""
    unknown = unknown_settings(environ)
    if unknown:
        _log.warning("not a setting, ignored: %s", ", ".join(unknown))
    config = load_config(environ)
    check_token_strength(config.api_token, config.token_source)
    return config


def _serve(options: argparse.Namespace) -> int:
    config = _load_config(os.environ)
    return lifecycle.run(
        config, config.pins, lambda url: _log.info("listening: %s", url)
    )


def _check(options: argparse.Namespace) -> int:
    from .check import run_checks

    config = _load_config(os.environ)
    passed = run_checks(config, config.pins, deep=options.deep, report=_say)
    return 0 if passed else EXIT_REFUSED


def _demo(options: argparse.Namespace) -> int:
    """Make the demo checkpoint and serve it through the very same loader."""
    from .demo import make_checkpoint

    environ = {"INTERN_DECISION_DEVICE": "cpu", **os.environ}
    if options.port is not None:
        environ["INTERN_DECISION_PORT"] = str(options.port)
    made = None
    if not _names_a_token(environ):
        made = environ["INTERN_DECISION_API_TOKEN"] = make_token()
    config = _load_config(environ)
    directory = options.dir or _cache_directory(environ)
    if config.device != "cpu":  # nothing of this process may meet the card before load
        maker = [sys.executable, "-m", "intern_decision_serve.demo"]
        subprocess.run(
            [*maker, str(directory), options.size, config.device], check=True
        )
    checkpoint = make_checkpoint(directory, size=options.size)
    config = dataclasses.replace(config, checkpoint=checkpoint.path)
    shown = made or _PLACES.get(config.token_source, "YOUR_TOKEN")
    return lifecycle.run(
        config, checkpoint.pins, lambda url: _say(_invitation(url, made, shown))
    )


def _names_a_token(environ: Mapping[str, str]) -> bool:
    names = ("INTERN_DECISION_API_TOKEN", "INTERN_DECISION_API_TOKEN_FILE")
    credentials = environ.get("CREDENTIALS_DIRECTORY")
    return any(name in environ for name in names) or (
        bool(credentials) and os.path.lexists(f"{credentials}/api-token")
    )


def _cache_directory(environ: Mapping[str, str]) -> Path:
    home = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "intern-decision-serve" / "demo"


def _invitation(url: str, made_token: str | None, shown: str) -> str:
    """The lines a stranger can paste; the token only if it was made here."""
    return "\n".join(
        [
            f"Random weights, for trying the surface only: {url}",
            *([f"token: {made_token}"] if made_token else []),
            f"curl -s {url}/health",
            *(
                f"curl -s {url}{path} -H 'Authorization: Bearer '\"{shown}\" "
                f"-d '{json.dumps(body)}'"
                for path, body in EXAMPLES.items()
            ),
        ]
    )
