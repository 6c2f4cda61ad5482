"""Refuse to install a stack that is not the pinned one.

Runs inside the build, without a GPU: `python check_stack.py EXPECTED_JSON`. Imports
what imports without a device, compares versions, and compiles the way Triton will.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping


def check(fact: bool, text: str) -> None:
    """Stop the build with one line unless `fact` holds."""
    if not fact:
        raise SystemExit(f"not the pinned stack: {text}")


def check_versions(distributions: Mapping[str, str]) -> None:
    """Compare every distribution's metadata; no import, so no device is asked for."""
    for name, version in distributions.items():
        found, _, _ = importlib.metadata.version(name).partition("+")  # +cu128
        check(found == version, f"{name} is {found}, pinned is {version}")


def check_torch(version: str, cuda: str) -> None:
    """The +cu128 wheel and the index's build of the same version are two builds."""
    torch = importlib.import_module("torch")
    check(torch.__version__ == version, f"torch is {torch.__version__}")
    check(torch.version.cuda == cuda, f"torch is built for CUDA {torch.version.cuda}")


def check_kernels() -> None:
    """transformers falls back to slow code without a word if one is missing."""
    importlib.import_module("causal_conv1d")
    importlib.import_module("causal_conv1d_cuda")
    check(importlib.util.find_spec("fla") is not None, "the package fla is missing")
    check(
        importlib.util.find_spec("kernels") is None,
        "the package kernels would look for kernels on a hub",
    )


def check_compiler() -> None:
    """Compile against Python.h with the wrapper's CC, and find nvrtc by bare name."""
    include = sysconfig.get_paths()["include"]
    with tempfile.TemporaryDirectory() as directory:
        source = os.path.join(directory, "probe.c")
        with open(source, "w", encoding="ascii") as file:
            file.write("#include <Python.h>\nint probe(void) { return 0; }\n")
        command = [os.environ["CC"], "-shared", "-fPIC", f"-I{include}", source]
        subprocess.run([*command, "-o", os.path.join(directory, "p.so")], check=True)
    ctypes.CDLL("libnvrtc.so.12")
    subprocess.run([os.environ["TRITON_PTXAS_PATH"], "--version"], check=True)


def check_triton() -> None:
    """A patched Triton once took the directory apart into its characters."""
    os.environ["TRITON_LIBCUDA_PATH"] = "/driver/lib"
    driver = importlib.import_module("triton.backends.nvidia.driver")
    found = driver.libcuda_dirs()
    check(found == ["/driver/lib"], f"Triton would look for libcuda in {found}")


def main() -> None:
    """Run every check; the first that fails ends the build."""
    expected = json.loads(sys.argv[1])
    check_versions(expected["distributions"])
    check_torch(expected["torch"], expected["cuda"])
    check_kernels()
    check_compiler()
    check_triton()
    importlib.import_module("intern_decision_serve")


if __name__ == "__main__":
    main()
