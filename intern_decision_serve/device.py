"""The card the engine runs on: present, capped, and of an architecture torch knows.

Every function takes the imported torch, so that this module imports none itself.
It must never allocate on the device; the cap has to come first (INV-4).
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from .errors import DeviceAbsent, StartupRefused

__all__ = [
    "apply_cap",
    "check_architecture",
    "check_model",
    "check_placement",
    "drop_expandable_segments",
    "is_card_full",
    "is_cuda",
    "name_device",
    "select_device",
]

GIB = 2**30
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_log = logging.getLogger(__name__)


def is_cuda(device: str) -> bool:
    """Tell `cuda` and `cuda:N` from `cpu`."""
    return device.partition(":")[0] == "cuda"


def drop_expandable_segments(environ: MutableMapping[str, str]) -> None:
    """Undo `expandable_segments`, which makes an out-of-memory error unrecoverable.

    torch reads these names when it is imported, so this comes before.
    """
    for name in ALLOCATOR_SETTINGS:
        settings = environ.get(name, "").split(",")
        kept = [item for item in settings if "expandable_segments" not in item]
        if kept == settings:
            continue
        if kept:
            environ[name] = ",".join(kept)
        else:
            del environ[name]
        _log.warning(
            "%s: expandable_segments removed: after one out-of-memory error "
            "the allocator would fail until restart",
            name,
        )


def select_device(torch: Any, device: str) -> int | None:
    """Make the card current on this thread; return its index, or None for the CPU.

    Triton launches on the current device, whatever device its tensors are on.
    Raises DeviceAbsent (75) when the driver shows no such card.
    """
    if not is_cuda(device):
        return None
    if not torch.cuda.is_available():
        raise DeviceAbsent(f"INTERN_DECISION_DEVICE is {device!r}: no CUDA device here")
    index = int(device.partition(":")[2] or 0)
    count = int(torch.cuda.device_count())
    if index >= count:
        raise DeviceAbsent(
            f"INTERN_DECISION_DEVICE is {device!r}: the driver shows {count} device(s)"
        )
    torch.cuda.set_device(index)
    return index


def apply_cap(torch: Any, index: int | None, cap_gib: float | None) -> None:
    """Bound the caching allocator to `cap_gib`, before anything is allocated (INV-4).

    CUDA's context and library workspaces stay outside it: 0.3 to 0.6 GiB.
    """
    if cap_gib is None:
        return
    if index is None:
        _log.warning("INTERN_DECISION_VRAM_CAP_GIB has no effect on the CPU")
        return
    total = int(torch.cuda.get_device_properties(index).total_memory)
    if cap_gib * GIB > total:
        raise StartupRefused(
            f"INTERN_DECISION_VRAM_CAP_GIB is {cap_gib:g}: "
            f"the card has {total / GIB:.2f} GiB"
        )
    torch.cuda.set_per_process_memory_fraction(cap_gib * GIB / total, index)
    _log.info("allocator cap %.3f GiB of %.2f GiB", cap_gib, total / GIB)


def is_card_full(torch: Any, index: int, cap_gib: float | None) -> bool:
    """Tell, after an out-of-memory error, a card that others fill from our own cap.

    Whichever leaves less room was met: what the driver has free, or the cap's rest.
    """
    if cap_gib is None:
        return True
    free, _ = torch.cuda.mem_get_info(index)
    rest = cap_gib * GIB - torch.cuda.memory_reserved(index)
    return bool(free < rest)


def check_model(torch: Any, model: Any, index: int | None) -> None:
    """Refuse a model off the asked device, or a torch without the card's code."""
    check_placement(model, index)
    check_architecture(torch, index)


def check_placement(model: Any, index: int | None) -> None:
    """Refuse a model with any weight or buffer off the asked device (INV-3)."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        wanted = tensor.device.type == ("cpu" if index is None else "cuda")
        if not wanted or (index is not None and tensor.device.index != index):
            asked = "cpu" if index is None else f"cuda:{index}"
            raise StartupRefused(
                f"the model is not on the asked device {asked}: "
                f"{name} is on {tensor.device}"
            )


def check_architecture(torch: Any, index: int | None) -> None:
    """Refuse a torch that was built without the card's `sm_XY` (INV-3)."""
    if index is None:
        return
    major, minor = torch.cuda.get_device_capability(index)
    built_for = torch.cuda.get_arch_list()
    if f"sm_{major}{minor}" not in built_for:
        raise StartupRefused(
            f"torch {torch.__version__} has no code for this card's "
            f"sm_{major}{minor}; it was built for {', '.join(built_for) or 'none'}"
        )


def name_device(torch: Any, index: int | None) -> str:
    """Read the card's name once; handler threads never ask for it (INV-2)."""
    return "cpu" if index is None else str(torch.cuda.get_device_name(index))
