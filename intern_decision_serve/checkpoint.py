"""The pinned code: find the snapshot, hash its inference.py, execute those very bytes.

Nothing of the checkpoint directory goes on `sys.path`, no `__pycache__` is read or
written there, and no byte is executed that was not hashed (INV-3).
"""

from __future__ import annotations

import hashlib
import platform
import sys
from pathlib import Path
from types import ModuleType

from .errors import StartupRefused
from .pins import ModelPins

__all__ = ["check_python", "check_snapshot_path", "execute_inference", "read_inference"]

_INFERENCE = "inference.py"

# Top-level module -> the distribution that brings it, where the names differ.
_INSTALL = {"PIL": "Pillow", "fla": "flash-linear-attention"}


def check_snapshot_path(checkpoint: str, pins: ModelPins) -> Path:
    """Return the snapshot directory; raise StartupRefused if it is not the pinned one.

    The path as written must end in snapshots/<revision>. A link of that name to the
    snapshot of another revision is refused too.
    """
    path = Path(checkpoint)
    wanted = ("snapshots", pins.revision)
    if path.parts[-2:] != wanted:
        raise StartupRefused(
            f"checkpoint {checkpoint!r}: the path must end in {'/'.join(wanted)}"
        )
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        # RuntimeError: a loop of links (before 3.13); ValueError: a NUL in the path
        raise StartupRefused(f"checkpoint {checkpoint!r}: {_reason(error)}") from None
    if not real.is_dir():
        raise StartupRefused(f"checkpoint {checkpoint!r}: not a directory")
    if real.parent.name == "snapshots" and real.name != pins.revision:
        raise StartupRefused(
            f"checkpoint {checkpoint!r}: a link to another revision, {real.name!r}"
        )
    return path


def read_inference(checkpoint: str, pins: ModelPins) -> bytes:
    """Return the bytes of inference.py once they hash to the pinned sha256 (INV-3).

    Raises StartupRefused for another path, a file that cannot be read, another hash.
    """
    path = check_snapshot_path(checkpoint, pins) / _INFERENCE
    try:
        source = path.read_bytes()
    except OSError as error:
        raise StartupRefused(f"{str(path)!r}: {_reason(error)}") from None
    found = hashlib.sha256(source).hexdigest()
    if found != pins.inference_sha256:
        raise StartupRefused(
            f"{str(path)!r}: sha256 is {found}, "
            f"the pin of {pins.name} is {pins.inference_sha256}"
        )
    return source


def execute_inference(
    source: bytes, pins: ModelPins, *, filename: str = "<pinned inference.py>"
) -> ModuleType:
    """Execute hashed bytes as a module; `filename` is what its tracebacks name.

    Runs on the inference thread: the imports in there already ask the driver about
    the card. Raises StartupRefused, one line, where the file cannot run here.
    """
    check_python(pins)
    # Dataclasses with postponed annotations look their module up in sys.modules.
    name = f"_pinned_inference_{pins.inference_sha256[:12]}"
    module = ModuleType(name)
    module.__file__ = filename
    sys.modules[name] = module
    try:
        # dont_inherit: this file's own __future__ import must not change that code
        code = compile(source, filename, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except Exception as error:
        sys.modules.pop(name, None)
        raise StartupRefused(_explain(error)) from error
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def check_python(pins: ModelPins) -> None:
    """Raise StartupRefused on an interpreter the pinned file does not compile on."""
    if sys.version_info[:2] < pins.min_python:
        needed = ".".join(map(str, pins.min_python))
        raise StartupRefused(
            f"inference.py of {pins.name} needs Python {needed} or later, "
            f"this is {platform.python_version()}"
        )


def _explain(error: Exception) -> str:
    """Say in one line why the file does not run here."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        install = _INSTALL.get(package, package)
        return f"inference.py needs the module {error.name!r}: install {install}"
    if isinstance(error, SyntaxError):
        return (
            f"inference.py does not compile on Python {platform.python_version()}: "
            f"line {error.lineno}: {error.msg}"
        )
    return f"inference.py failed: {type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), "no message")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or _first_line(error)
