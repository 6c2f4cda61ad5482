"""Which code each fast kernel is bound to, and what Triton needs before it compiles.

transformers takes a fast kernel's package at import and, on ANY exception there, its
own slow torch function; only a warning says so. This module looks at what was bound
in the end. It must never import a kernel package itself, nor change a binding.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import StartupRefused

__all__ = [
    "KERNELS",
    "check_kernels",
    "check_triton",
    "find_kernels",
    "log_kernels",
    "report_kernels",
]

MODELING = "transformers.models.qwen3_5.modeling_qwen3_5"

# Kernel -> the name transformers 5.17.0 binds it under in the modeling module.
KERNELS = {
    "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn": "causal_conv1d_fn",
    "causal_conv1d_update": "causal_conv1d_update",
}
# Import name -> the distributions that can bring it, the one with the kernels first.
DISTRIBUTIONS = {
    "fla": ("fla-core", "flash-linear-attention"),
    "causal_conv1d": ("causal-conv1d",),
    "transformers": ("transformers",),
}
SWITCH = "INTERN_DECISION_ALLOW_SLOW_KERNELS=1"

_log = logging.getLogger(__name__)

Report = dict[str, dict[str, Any]]


def find_kernels() -> Report:
    """Report each kernel's implementation, package, version and whether it is fast."""
    modeling = sys.modules.get(MODELING)
    return {name: _describe(_bound(modeling, KERNELS[name])) for name in KERNELS}


def report_kernels(is_cuda: bool, *, allow_slow: bool) -> Report:
    """Find and log every kernel; on CUDA refuse a fallback that was not allowed."""
    report = find_kernels()
    log_kernels(report)
    if is_cuda:
        check_kernels(report, allow_slow=allow_slow)
    return report


def check_kernels(report: Report, *, allow_slow: bool) -> None:
    """Refuse a slow fallback on CUDA, whose numbers differ too; mark it if allowed."""
    slow = [name for name, bound in report.items() if not bound["fast"]]
    if not slow:
        return
    if not allow_slow:
        raise StartupRefused(
            f"slow fallbacks are bound for {', '.join(slow)}: install fla-core, "
            "flash-linear-attention and causal-conv1d so that they import and see "
            f"the card, or set {SWITCH}"
        )
    for name in slow:
        report[name]["allowed_by"] = SWITCH
    _log.warning(
        "SLOW KERNELS ALLOWED by %s: %s; calls take about twice as long and the "
        "numbers are not those of the fast kernels",
        SWITCH,
        ", ".join(slow),
    )


def log_kernels(report: Report) -> None:
    """Write one line per kernel."""
    for name, bound in report.items():
        _log.info(
            "kernel %s: %s (%s %s)%s",
            name,
            bound["implementation"],
            bound["package"],
            bound["version"],
            "" if bound["fast"] else ", slow",
        )


def _bound(modeling: ModuleType | None, name: str) -> Any:
    """Return the function that runs under `name`, or None where none can be told.

    transformers' wrapper keeps it in a closure cell called `implementation`.
    """
    wrapper = getattr(modeling, name, None)
    code = getattr(wrapper, "__code__", None)
    cells = dict(
        zip(
            getattr(code, "co_freevars", ()),
            getattr(wrapper, "__closure__", None) or (),
            strict=False,
        )
    )
    return cells["implementation"].cell_contents if "implementation" in cells else None


def _describe(function: Any) -> dict[str, Any]:
    if function is None:
        unknown = dict.fromkeys(("implementation", "package", "version"))
        return {**unknown, "fast": False}
    module = str(function.__module__)
    package, version = _distribution(module.partition(".")[0])
    return {
        "implementation": f"{module}.{function.__qualname__}",
        "package": package,
        "version": version,
        "fast": _is_fast(module),
    }


def _is_fast(module: str) -> bool:
    """Tell a kernel from torch code, and a Triton that fell back to the CPU."""
    root = module.partition(".")[0]
    if root == "fla":
        return getattr(sys.modules.get("fla.utils"), "device_platform", None) == "cuda"
    return root == "causal_conv1d"


def _distribution(root: str) -> tuple[str, str | None]:
    for name in DISTRIBUTIONS.get(root, (root,)):
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return root, None


def check_triton(environ: Mapping[str, str]) -> None:
    """Refuse now, in one line, what would be a traceback at the first kernel.

    Without fla nothing is compiled, and the kernel check speaks instead.
    """
    if importlib.util.find_spec("fla") is None:
        return
    _check_cache(Path(_cache_folder(environ)))
    wanted = environ.get("CC")
    names = (wanted,) if wanted else ("gcc", "clang")  # Triton's own order
    if not any(shutil.which(name, path=environ.get("PATH")) for name in names):
        raise StartupRefused(
            f"Triton needs a C compiler: {' or '.join(names)} is not on PATH; set CC"
        )
    folders = _include_folders(environ)
    if not any((Path(folder) / "Python.h").is_file() for folder in folders):
        raise StartupRefused(
            f"Triton needs Python.h of this Python: not in {', '.join(folders)}; "
            "install the headers or set CPATH"
        )


def _cache_folder(environ: Mapping[str, str]) -> str:
    home = environ.get("TRITON_HOME") or environ.get("HOME") or os.path.expanduser("~")
    return environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")


def _check_cache(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
        flags = os.statvfs(folder).f_flag
    except OSError as error:
        raise StartupRefused(
            f"Triton's cache {str(folder)!r} is not writable: {error.strerror}; "
            "set TRITON_CACHE_DIR"
        ) from None
    if flags & os.ST_NOEXEC:
        raise StartupRefused(
            f"Triton's cache {str(folder)!r} is on a noexec mount, its launchers "
            "could not be loaded; set TRITON_CACHE_DIR"
        )


def _include_folders(environ: Mapping[str, str]) -> list[str]:
    own = sysconfig.get_paths(scheme="posix_prefix")["include"]
    lists = (environ.get("CPATH", ""), environ.get("C_INCLUDE_PATH", ""))
    return [own, *(folder for entry in lists for folder in entry.split(":") if folder)]
