"""A torch that allocates nothing: enough of it to load, score, fail and release.

The allocator is honest where the engine depends on it: memory counts as allocated
while a tensor lives, stays reserved until `empty_cache`, and runs out at the cap.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator
from typing import Any

MIB = 2**20


class OutOfMemoryError(RuntimeError):
    """torch.OutOfMemoryError."""


class Device:
    """torch.device: a type and an index."""

    def __init__(self, name: str) -> None:
        self.type, _, index = name.partition(":")
        self.index = int(index) if index else (0 if self.type == "cuda" else None)

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


class Module:
    """torch.nn.Module, as far as a stub needs it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class FakeTorch(types.ModuleType):
    """The module to put into `sys.modules["torch"]`."""

    OutOfMemoryError = OutOfMemoryError
    device = Device
    nn = types.SimpleNamespace(Module=Module)

    def __init__(self, **cuda: Any) -> None:
        super().__init__("torch")
        self.__version__ = "2.10.0+fake"
        self.cuda = FakeCuda(**cuda)

    def allocate(self, mib: int, device: Any = "cpu", values: Any = ()) -> Tensor:
        """Make a tensor of that size; OutOfMemoryError over the cap."""
        return Tensor(self, mib, device, values)


class Tensor:
    """Holds its bytes in the fake allocator for as long as it lives."""

    dtype = "torch.bfloat16"

    def __init__(self, torch: FakeTorch, mib: int, device: Any, values: Any) -> None:
        self.torch = torch
        self.device = device if isinstance(device, Device) else Device(device)
        self.values = values
        self.size = mib * MIB
        if self.device.type == "cuda":
            torch.cuda.hold(self)

    def to(self, device: Any) -> Tensor:
        return Tensor(self.torch, self.size // MIB, device, self.values)

    def tolist(self) -> Any:
        return list(self.values)


class FakeCuda:
    """torch.cuda with one caching allocator and a log of what it was asked."""

    OutOfMemoryError = OutOfMemoryError

    def __init__(
        self,
        *,
        devices: int = 1,
        total_mib: int = 16 * 1024,
        capability: tuple[int, int] = (9, 0),
        arch_list: tuple[str, ...] = ("sm_80", "sm_90"),
    ) -> None:
        self.devices = devices
        self.total = total_mib * MIB
        self.limit = self.total
        self.others = 0
        self.capability = capability
        self.arch_list = arch_list
        self.current = 0
        self.reserved = 0
        self.peak = 0
        self.events: list[str] = []
        self.broken = False
        self.live_at_empty_cache: list[int] = []
        self._live: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def hold(self, tensor: Tensor) -> None:
        allocated = self.memory_allocated() + tensor.size
        if allocated > min(self.limit, self.total - self.others):
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate some")
        self._live.add(tensor)
        self.reserved = max(self.reserved, allocated)
        self.peak = max(self.peak, self.reserved)

    def live(self) -> Iterator[Tensor]:
        return iter(list(self._live))

    def is_available(self) -> bool:
        return self.devices > 0

    def device_count(self) -> int:
        return self.devices

    def set_device(self, index: int) -> None:
        self.current = index
        self.events.append(f"set_device {index}")

    def get_device_properties(self, index: int) -> Any:
        return types.SimpleNamespace(total_memory=self.total)

    def get_device_capability(self, index: int) -> tuple[int, int]:
        return self.capability

    def get_device_name(self, index: int) -> str:
        return "Fake H200"

    def get_arch_list(self) -> list[str]:
        return list(self.arch_list)

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        self.limit = int(fraction * self.total)
        self.events.append(f"cap {fraction:.4f}")

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return self.total - self.others - self.reserved, self.total

    def memory_allocated(self, index: int = 0) -> int:
        return sum(tensor.size for tensor in self.live())

    def memory_reserved(self, index: int = 0) -> int:
        return self.reserved

    def max_memory_reserved(self, index: int = 0) -> int:
        return self.peak

    def empty_cache(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        self.events.append("empty_cache")
        self.live_at_empty_cache.append(self.memory_allocated())
        self.reserved = self.memory_allocated()
