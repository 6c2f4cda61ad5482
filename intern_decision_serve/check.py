"""What can be verified without loading weights: the work of the `check` subcommand.

Every finding is one line that begins with ok, warn or FAIL. This module imports neither
torch nor transformers, executes nothing of the checkpoint and writes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import struct
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from .auth import check_token_strength
from .checkpoint import check_python, check_snapshot_path, read_inference
from .config import Config
from .errors import StartupRefused
from .pins import FAMILY, PINNED_STACK, ModelPins

__all__ = ["run_checks"]

_OK, _WARN, _FAIL = "ok", "warn", "FAIL"
_Findings = Iterator[tuple[str, str]]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TEMPLATE = "chat_template.jinja"

_MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses a longer one
_CHUNK_BYTES = 1 << 20
_PROGRESS_BYTES = 1 << 30

# The pinned inference.py imports PIL, and its AutoProcessor needs torchvision.
_IMAGE_LIBRARIES = ("torchvision", "pillow")
_REQUIRED = ("torch", "transformers", *_IMAGE_LIBRARIES)

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")


def run_checks(
    config: Config, pins: ModelPins, *, deep: bool, report: Callable[[str], None]
) -> bool:
    """Report every finding, one line each; return False if any is a FAIL."""
    passed = True
    for level, text in _find(config, pins, deep):
        report(f"{level:<4}  {' '.join(text.splitlines())}")
        passed = passed and level != _FAIL
    return passed


def _find(config: Config, pins: ModelPins, deep: bool) -> _Findings:
    yield from _guarded("settings", _check_settings(config, pins))
    yield from _guarded("Python", _check_python(pins))
    yield from _check_libraries(config, pins)
    try:
        snapshot = check_snapshot_path(config.checkpoint, pins)
    except StartupRefused as error:
        yield _FAIL, f"snapshot: {error}"
        return
    yield _OK, f"snapshot: {config.checkpoint}"
    yield from _guarded("inference.py", _check_inference(config, pins))
    yield from _guarded("config.json", _check_model_config(snapshot))
    yield from _guarded("weights", _check_weights(snapshot))
    yield from _guarded("tokenizer", _check_tokenizer(snapshot))
    if deep:
        yield from _guarded("blobs", _check_blobs(snapshot))


def _guarded(subject: str, findings: _Findings) -> _Findings:
    """Pass findings on; what one of them raises becomes a FAIL line and ends them."""
    try:
        yield from findings
    except (OSError, StartupRefused, ValueError) as error:
        yield _FAIL, f"{subject}: {error}"


def _check_settings(config: Config, pins: ModelPins) -> _Findings:
    check_token_strength(config.api_token, config.token_source)
    yield _OK, f"settings: {pins.name} on {config.device}"


def _check_python(pins: ModelPins) -> _Findings:
    check_python(pins)
    needed = ".".join(map(str, pins.min_python))
    yield _OK, f"Python: {platform.python_version()}, {needed} or later needed"


def _check_libraries(config: Config, pins: ModelPins) -> _Findings:
    """Compare what is installed with the stack that was measured.

    Only the family's inference.py needs the image libraries; the kernel packages
    matter to the family's numbers and on every CUDA device.
    """
    in_family = pins in FAMILY.values()
    for name in (*PINNED_STACK, *_IMAGE_LIBRARIES):
        if name in _IMAGE_LIBRARIES and not in_family:
            continue
        if name not in _REQUIRED and config.device == "cpu" and not in_family:
            continue
        installed, pinned = _find_version(name), PINNED_STACK.get(name)
        if installed is None:
            yield _judge_missing(name, config)
        elif pinned is not None and installed.partition("+")[0] != pinned:
            yield _WARN, f"library: {name} {installed}, {pinned} was measured"
        else:
            yield _OK, f"library: {name} {installed}"


def _judge_missing(name: str, config: Config) -> tuple[str, str]:
    if name in _REQUIRED:
        return _FAIL, f"library: {name} is not installed"
    slow = f"library: {name} is not installed: slow torch code, other numbers"
    refused = config.device != "cpu" and not config.allow_slow_kernels
    return (_FAIL if refused else _WARN), slow


def _find_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check_inference(config: Config, pins: ModelPins) -> _Findings:
    read_inference(config.checkpoint, pins)
    yield _OK, f"inference.py: sha256 {pins.inference_sha256}"


def _check_model_config(snapshot: Path) -> _Findings:
    document = _read_object(snapshot / "config.json")
    yield _OK, f"config.json: model_type {document.get('model_type')!r}"


def _check_weights(snapshot: Path) -> _Findings:
    for name, tensors in _list_shards(snapshot).items():
        yield from _guarded(name, _check_shard(snapshot / name, tensors))


def _list_shards(snapshot: Path) -> dict[str, set[str]]:
    """Map each weight file to the tensors the index places in it."""
    shards: dict[str, set[str]] = {}
    has_index = os.path.lexists(snapshot / _INDEX)
    if not has_index or os.path.lexists(snapshot / _SINGLE):
        shards[_SINGLE] = set()  # transformers prefers it where both are there
    if not has_index:
        return shards
    placed = _read_object(snapshot / _INDEX).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{_INDEX}: no weight_map")
    for tensor, shard in placed.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{_INDEX}: {shard!r} is not a file name")
        shards.setdefault(shard, set()).add(tensor)
    return dict(sorted(shards.items()))


def _check_shard(path: Path, tensors: set[str]) -> _Findings:
    size = path.stat().st_size
    header_bytes, header = _read_header(path, size)
    lacking = sorted(tensors - header.keys())
    if lacking:
        raise ValueError(f"lacks {len(lacking)} tensors of the index: {lacking[0]!r}")
    needed = 8 + header_bytes + _measure_data(header)
    if size != needed:
        raise ValueError(f"{size} bytes, its header says {needed}")
    count = len(header.keys() - {"__metadata__"})
    yield _OK, f"{path.name}: {count} tensors, {size} bytes"


def _read_header(path: Path, size: int) -> tuple[int, dict[str, Any]]:
    """Read a safetensors header: 8 bytes of little-endian length, then JSON."""
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ValueError(f"{size} bytes are too few for a safetensors header")
        (length,) = struct.unpack("<Q", prefix)
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"not safetensors: a header of {length} bytes")
        return length, _parse_object(file.read(length), "safetensors header")


def _measure_data(header: dict[str, Any]) -> int:
    """Return the bytes of tensor data the header accounts for."""
    end = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        match offsets:
            case [int(first), int(last)] if 0 <= first <= last:
                end = max(end, last)
            case _:
                raise ValueError(f"not safetensors: tensor {name!r} has no offsets")
    return end


def _check_tokenizer(snapshot: Path) -> _Findings:
    _read_object(snapshot / "tokenizer.json")
    yield _OK, "tokenizer: tokenizer.json"
    settings = _read_object(snapshot / "tokenizer_config.json")
    yield _OK, "tokenizer: tokenizer_config.json"
    if (snapshot / _TEMPLATE).exists():
        origin, template = _TEMPLATE, (snapshot / _TEMPLATE).read_text("utf-8")
    else:
        origin = "tokenizer_config.json"
        template = settings.get("chat_template") or ""
    if not template:
        raise ValueError(f"no chat template ({_TEMPLATE} or tokenizer_config.json)")
    yield _OK, f"tokenizer: chat template in {origin}"


def _check_blobs(snapshot: Path) -> _Findings:
    """Hash every file of the snapshot that a cache blob's name vouches for."""
    weights = set(_list_shards(snapshot))
    for path in sorted(snapshot.iterdir()):
        if path.is_dir() or path.name == "inference.py":  # inference.py has its own pin
            continue
        yield from _guarded(path.name, _check_blob(path, path.name in weights))


def _check_blob(path: Path, is_weight: bool) -> _Findings:
    """Compare one file with the name of the blob it links to.

    The cache names a large file by its sha256, a small one by its git blob id.
    """
    blob = path.resolve(strict=True)
    size = blob.stat().st_size
    if _SHA256.fullmatch(blob.name):
        kind, digest = "sha256", hashlib.sha256()
    elif _SHA1.fullmatch(blob.name):
        kind, digest = "git blob", hashlib.sha1(usedforsecurity=False)
        digest.update(b"blob %d\0" % size)
    else:
        if is_weight:
            yield _WARN, f"{path.name}: not a cache blob, nothing to compare with"
        return
    read = 0
    with blob.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            read += len(chunk)
            if read % _PROGRESS_BYTES == 0:
                yield _OK, f"{path.name}: {read >> 30} of {size / 2**30:.1f} GiB read"
    if digest.hexdigest() != blob.name:
        raise ValueError(f"{kind} is {digest.hexdigest()}, its blob is {blob.name}")
    yield _OK, f"{path.name}: {kind} {blob.name}"


def _read_object(path: Path) -> dict[str, Any]:
    return _parse_object(path.read_bytes(), path.name)


def _parse_object(text: bytes, name: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{name}: not a JSON object")
    return document
