"""Loads the real engine on the fake torch and the fake checkpoint."""

from __future__ import annotations

import gc
import hashlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from fake_torch import FakeTorch

from intern_decision_serve import engine, kernels
from intern_decision_serve.pins import ModelPins

SOURCE = (Path(__file__).parent / "fake_inference.py").read_bytes()
PINS = ModelPins(
    name="Fake-Decision",
    source="nobody/Fake-Decision",
    revision="f" * 40,
    inference_sha256=hashlib.sha256(SOURCE).hexdigest(),
    temperature=1.0,
    min_python=(3, 11),
)
REQUEST = {"state": "a b c", "questions": {"q": {"type": "choice"}}}


def _kernel(module: str) -> Any:
    def kernel() -> None:
        """Stands for a kernel function."""

    kernel.__module__ = module
    return kernel


def bind(implementation: Any) -> Any:
    """Wrap as transformers does: the function that runs sits in a closure cell."""

    def wrapped() -> Any:
        return implementation

    return wrapped


def make_modeling(**modules: str) -> types.ModuleType:
    """A modeling module whose kernels come from `modules`, by default fast ones."""
    modeling = types.ModuleType(kernels.MODELING)
    for name, attribute in kernels.KERNELS.items():
        fast = "causal_conv1d.fake" if "conv1d" in name else "fla.ops.fake"
        setattr(modeling, attribute, bind(_kernel(modules.get(name, fast))))
    return modeling


class Harness:
    """A snapshot, a fake torch, and `load()` with the keywords a test changes."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.torch = FakeTorch()
        self.snapshot = directory / "snapshots" / PINS.revision
        self.snapshot.mkdir(parents=True)
        (self.snapshot / "inference.py").write_bytes(SOURCE)
        self.plant: Any = lambda control: None
        self.progress: list[str] = []
        self.put("torch", self.torch)
        self.put("transformers", types.SimpleNamespace(__version__="5.17.0"))
        self.put(kernels.MODELING, make_modeling())
        self.put("fla.utils", types.SimpleNamespace(device_platform="cuda"))
        # The collector's permanent generation belongs to the test process.
        monkeypatch.setattr(gc, "freeze", lambda: None)
        monkeypatch.setattr(kernels, "check_triton", lambda environ: None)
        execute = engine.execute_inference

        def execute_and_plant(source: bytes, pins: ModelPins) -> types.ModuleType:
            module = execute(source, pins)
            monkeypatch.setitem(sys.modules, module.__name__, module)
            self.control = module.CONTROL
            self.inference = module
            self.plant(module.CONTROL)
            return module

        monkeypatch.setattr(engine, "execute_inference", execute_and_plant)

    def put(self, name: str, module: Any) -> None:
        self.monkeypatch.setitem(sys.modules, name, module)

    def count_encodes(self, engine: engine.Engine) -> list[int]:
        """Return a list that grows by one for every encode on the inference thread."""
        encodes: list[int] = []
        original = engine._encode._encode

        def encode(row: Any) -> Any:
            encodes.append(1)
            return original(row)

        self.monkeypatch.setattr(engine._encode, "_encode", encode)
        return encodes

    def load(self, **changes: Any) -> engine.Engine:
        arguments: dict[str, Any] = {
            "checkpoint": str(self.snapshot),
            "device": "cuda",
            "vram_cap_gib": None,
            "max_tokens": 4096,
            "release_slack_mib": 512,
            "keep_vision": False,
            "allow_slow_kernels": False,
            "warmup_tokens": (),
            "cuda_graphs": 0,
            "cuda_graphs_mib": 0,
            "progress": self.progress.append,
        }
        return engine.load_engine(PINS, **{**arguments, **changes})
