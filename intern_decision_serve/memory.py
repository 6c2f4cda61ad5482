"""What the engine holds on the card: failures sorted, memory freed, counters read.

It must never keep an exception, a frame or a tensor, nor hand one to a log record:
whatever pins the failed call's frames pins its tensors (INV-4).
"""

from __future__ import annotations

import gc
import traceback
from typing import Any

__all__ = [
    "Memory",
    "drop_frames",
    "format_failure",
    "is_context_lost",
    "is_out_of_memory",
]

MIB = 2**20

# Facts: an asynchronous CUDA error stays with the context. Every later call in the
# process fails the same way, or worse, returns; only a new process helps. The
# allocator's own assertion is as final (pytorch#188008).
LOST_CONTEXT_MARKS = (
    "cuda error",
    "[cuda]",  # how Triton names a driver error
    "device-side assert",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "launch timed out",
    "uncorrectable ecc",
    "internal assert failed",
)
# Said of one launch or one call, before anything ran: the context may be well. The
# warm-up decides, or a client could restart the server with an odd shape.
REFUSED_LAUNCH_MARKS = ("invalid configuration", "invalid argument", "cublas_status_")


def is_out_of_memory(torch: Any, error: BaseException) -> bool:
    """Recognise the three forms an exhausted card takes.

    torch's own class, a RuntimeError whose first line says so (INV-4), and cuBLAS
    that could not allocate its workspace.
    """
    classes = (
        getattr(torch, "OutOfMemoryError", None),
        getattr(torch.cuda, "OutOfMemoryError", None),
    )
    if isinstance(error, tuple(found for found in classes if found is not None)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error)
    first_line = message.partition("\n")[0].lower()
    return "out of memory" in first_line or "CUBLAS_STATUS_ALLOC_FAILED" in message


def is_context_lost(torch: Any, error: BaseException) -> bool:
    """Recognise an error after which nothing may be scored in this process."""
    if not isinstance(error, RuntimeError):
        return False
    message = str(error).lower()
    if any(mark in message for mark in REFUSED_LAUNCH_MARKS):
        return False
    accelerator_error = getattr(torch, "AcceleratorError", None)
    if accelerator_error is not None and isinstance(error, accelerator_error):
        return True
    return any(mark in message for mark in LOST_CONTEXT_MARKS)


def format_failure(error: BaseException) -> str:
    """Return the traceback as text: a record's `exc_info` would keep the frames."""
    return "".join(traceback.format_exception(error)).rstrip()


def drop_frames(error: BaseException) -> None:
    """Clear every frame that `error` and the errors chained to it still hold."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        waiting += [link.__context__, link.__cause__]
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = link.__context__ = link.__cause__ = None
        link.args = tuple(str(argument) for argument in link.args)


class Memory:
    """The allocator of one card, seen from the inference thread; a no-op on the CPU."""

    def __init__(self, torch: Any, index: int | None, *, slack_mib: int) -> None:
        self._cuda: Any = None if index is None else torch.cuda
        self._index = index
        self._slack = slack_mib * MIB
        self._baseline: int | None = None
        self.graph_pool = 0  # reserved bytes that captured graphs keep, as last counted

    def release(self) -> None:
        """Collect what nothing refers to, then give the cached blocks back (INV-4).

        The order matters: `empty_cache` frees no block that a tensor still uses.
        """
        gc.collect()
        if self._cuda is not None:
            self._cuda.empty_cache()
            if self.graph_pool:
                self.count_graph_pool()

    def count_graph_pool(self) -> int:
        """Count the bytes reserved in private pools: those that graphs replay in.

        `empty_cache` leaves them alone while a graph of the pool lives.
        """
        self.graph_pool = sum(
            int(segment["total_size"])
            for segment in self._cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) != (0, 0)
        )
        return self.graph_pool

    def set_baseline(self) -> None:
        """Release, then take what stays reserved as the post-warm-up baseline."""
        self.release()
        # What startup built lives as long as the process. Frozen, it is not walked
        # by the collection that follows each failed call.
        gc.freeze()
        if self._cuda is not None:
            self._baseline = self._reserved()

    def release_excess(self) -> None:
        """Give blocks back when a burst left more than baseline plus slack (INV-4)."""
        if self._cuda is None or self._baseline is None:
            return
        if self._reserved() > self._baseline + self._slack:
            self._cuda.empty_cache()

    def _reserved(self) -> int:
        """Reserved bytes less the graph pool: it stays, so a release would not help."""
        return int(self._cuda.memory_reserved(self._index)) - self.graph_pool

    def counters(self) -> dict[str, float | None]:
        """Read the allocator, in MiB; every value is None on the CPU."""
        names = ("baseline_mib", "allocated_mib", "reserved_mib", "peak_mib")
        if self._cuda is None:
            return dict.fromkeys(names)
        read = (
            self._baseline,
            self._cuda.memory_allocated(self._index),
            self._cuda.memory_reserved(self._index),
            self._cuda.max_memory_reserved(self._index),
        )
        return {
            name: None if value is None else round(value / MIB, 1)
            for name, value in zip(names, read, strict=True)
        }
