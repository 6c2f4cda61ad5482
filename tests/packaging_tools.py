"""What the packaging tests share: outside tools, unit files, evaluated Nix."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = [
    "NIX",
    "REPOSITORY",
    "STUB",
    "SYSTEMD",
    "evaluate_module",
    "find_tool",
    "make_nix_environ",
    "normalise",
    "read_unit",
    "run_nix",
]

REPOSITORY = Path(__file__).parents[1]
NIX = REPOSITORY / "nix"
SYSTEMD = REPOSITORY / "systemd"
STUB = Path(__file__).parent / "nix_stub"

_NIX_CONF = """\
sandbox = false
build-users-group =
substituters =
experimental-features = nix-command flakes
"""

Settings = dict[str, list[str]]


def find_tool(name: str, package: str) -> str:
    """The tool's path. Missing, the test is skipped, but fails where CI installs it."""
    found = shutil.which(name)
    if found is None:
        reason = f"{name} is not installed (Debian package {package})"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def make_nix_environ(directory: Path) -> dict[str, str]:
    """An environment in which Nix has a store of its own and reaches no network."""
    conf = directory / "etc"
    conf.mkdir()
    (conf / "nix.conf").write_text(_NIX_CONF)
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(directory),
        "NIX_CONF_DIR": str(conf),
        "NIX_STORE_DIR": str(directory / "store"),
        "NIX_STATE_DIR": str(directory / "var"),
        "NIX_LOCALSTATE_DIR": str(directory / "var"),
        "NIX_LOG_DIR": str(directory / "log"),
    }


def run_nix(
    environ: Mapping[str, str], *command: str
) -> subprocess.CompletedProcess[str]:
    """Run one of Nix's commands; the caller judges its status."""
    program, *arguments = command
    return subprocess.run(
        [find_tool(program, "nix-bin"), *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=50,
    )


def evaluate_module(environ: Mapping[str, str], **settings: Any) -> tuple[Any, str]:
    """Evaluate module.nix under `settings`: what it asks for, or None and the error."""
    done = run_nix(
        environ,
        "nix-instantiate",
        *("--store", "dummy://", "--eval", "--strict", "--json"),
        *("--argstr", "settings", json.dumps({"enable": True, **settings})),
        str(STUB / "evaluate.nix"),
    )
    return (json.loads(done.stdout) if done.returncode == 0 else None), done.stderr


def read_unit(path: Path, instance: str = "") -> dict[str, Settings]:
    """Parse a unit file: section -> key -> every value assigned, `%i` filled in."""
    sections: dict[str, Settings] = {}
    section: Settings = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.strip()
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith(("#", ";")):
            key, _, value = line.partition("=")
            section.setdefault(key, []).append(value.replace("%i", instance))
    return sections


def normalise(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """One spelling for both sides: words in order, yes and no, programs by name."""
    return {key: _words(key, value) for key, value in settings.items()}


def _words(key: str, value: Any) -> list[str]:
    values: Sequence[Any] = value if isinstance(value, list) else [value]
    words = [word for one in values for word in _spell(one).split()]
    if key == "ExecStart":
        words = [word.rsplit("/", 1)[-1] for word in words]
    return words


def _spell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
