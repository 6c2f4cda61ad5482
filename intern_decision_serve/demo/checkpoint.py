"""The demo checkpoint on disk: a snapshot laid out as a Hugging Face cache lays one.

It owns the directory, the revision and the pins. It must never change a snapshot that
is complete, nor leave half a one under its final name; torch loads only when one is
made.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from intern_decision_serve.demo.tokenizer import read_template, write_tokenizer
from intern_decision_serve.demo.weights import SIZES, write_weights
from intern_decision_serve.demo.words import WORDS
from intern_decision_serve.pins import ModelPins

__all__ = ["DemoCheckpoint", "demo_pins", "make_checkpoint", "read_packaged_inference"]

NAME = "Intern-Decision-Demo"
SOURCE = f"demo/{NAME}"
TEMPERATURE = 1.5  # DEFAULT_TEMPERATURE of demo/inference.py; a test holds them equal
GENERATION = 1  # raise it when the code that writes the files changes them

_INDEX = "model.safetensors.index.json"
_FILES = ("config.json", "inference.py", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class DemoCheckpoint:
    """A snapshot directory and the pins that the loader is to hold it to."""

    path: str
    pins: ModelPins


def read_packaged_inference() -> bytes:
    """Return the bytes of the demo's inference.py as packaged."""
    return files(__package__).joinpath("inference.py").read_bytes()


def demo_pins(size: str = "tiny") -> ModelPins:
    """Return the pins of one size, from the packaged files alone."""
    inference = read_packaged_inference()
    made_of = (read_template(), *WORDS, repr(SIZES[size]), f"{GENERATION} {size}")
    return ModelPins(
        name=NAME,
        source=SOURCE,
        revision=hashlib.sha1(inference + "\0".join(made_of).encode()).hexdigest(),
        inference_sha256=hashlib.sha256(inference).hexdigest(),
        temperature=TEMPERATURE,
        min_python=(3, 11),
    )


def make_checkpoint(
    directory: Path, *, size: str = "tiny", device: str = "cpu"
) -> DemoCheckpoint:
    """Make the checkpoint under `directory`, or reuse the complete one there.

    `size` is one of `SIZES`; the random weights are drawn on `device`.
    """
    if size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(SIZES)}, not {size!r}")
    pins = demo_pins(size)
    repository = directory / ("models--" + SOURCE.replace("/", "--"))
    snapshot = repository / "snapshots" / pins.revision
    if not _is_complete(snapshot):
        _write_snapshot(snapshot, size, device)
    return DemoCheckpoint(path=str(snapshot.absolute()), pins=pins)


def _is_complete(snapshot: Path) -> bool:
    try:
        index = json.loads((snapshot / _INDEX).read_bytes())
        shards = set(index["weight_map"].values())
    except (OSError, ValueError, KeyError):
        return False
    return all((snapshot / name).is_file() for name in (*_FILES, *shards))


def _write_snapshot(snapshot: Path, size: str, device: str) -> None:
    """Build beside the final name, then rename: a killed run leaves no snapshot."""
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    snapshot.parent.mkdir(exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=snapshot.parent))
    try:
        (building / "inference.py").write_bytes(read_packaged_inference())
        write_weights(building, size, write_tokenizer(building), device=device)
        for path in sorted(building.iterdir()):
            _move_to_blobs(path, blobs)
        building.chmod(0o755)
        if snapshot.exists():  # one that lost a file: it cannot be mended in place
            shutil.rmtree(snapshot)
        building.rename(snapshot)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _move_to_blobs(path: Path, blobs: Path) -> None:
    """Store a file under its sha256, read-only, and link to it from the snapshot."""
    with path.open("rb") as file:
        blob = blobs / hashlib.file_digest(file, "sha256").hexdigest()
    path.chmod(0o444)
    os.replace(path, blob)
    path.symlink_to(Path("..", "..", "blobs", blob.name))
