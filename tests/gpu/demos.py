"""Starts the demo at a given size on a given card, as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from served import Options

sys.path.insert(0, str(Path(__file__).parents[1]))

import demo_server
from demo_server import TOKEN, DemoServer, make_environ

__all__ = ["TOKEN", "DemoServer", "make_environ", "start_instance"]

demo_server.START_SECONDS = 420.0  # the first start compiles every kernel of the ladder


def start_instance(
    options: Options,
    logs: Path,
    name: str,
    *,
    port: int = 0,
    gpu: int = 0,
    **settings: str,
) -> DemoServer:
    """Start one and return at once; its Triton cache is beside the checkpoint."""
    ours = {"DEVICE": options.device, "ALLOW_SLOW_KERNELS": "1", **settings}
    arguments = ["demo", "--port", str(port), "--size", options.size]
    log, out = logs / f"{name}.log", logs / f"{name}.out"
    with log.open("wb") as stderr, out.open("wb") as stdout:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "intern_decision_serve"),
                *(*arguments, "--dir", str(options.directory)),
            ],
            env={
                **make_environ(API_TOKEN=TOKEN, **ours),
                "CUDA_VISIBLE_DEVICES": str(gpu),
                "TRITON_CACHE_DIR": str(options.directory / "triton"),
            },
            stdout=stdout,
            stderr=stderr,
        )
    return DemoServer(process, log, out)
