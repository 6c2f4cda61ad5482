"""A torch that captures and replays without a GPU, as strict as the real one where it
matters: what runs in a capture is recorded, not run; a read on the host breaks the
capture off; a pool lives as long as a graph of it, and no longer.
"""

from __future__ import annotations

import contextlib
import struct
import types
from collections.abc import Callable, Iterator
from typing import Any

MIB = 2**20
VOCABULARY = 3


class OutOfMemoryError(RuntimeError):
    """torch.OutOfMemoryError."""


class Tensor:
    """A contiguous view of a shared list: enough for ids, positions and logits."""

    def __init__(
        self, torch: GraphTorch, data: list[Any], shape: tuple[int, ...], start: int = 0
    ) -> None:
        self.torch, self.data, self.shape, self.start = torch, data, shape, start
        self.dtype, self.device = "bfloat16", "cuda:0"

    @property
    def size(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def values(self) -> list[Any]:
        return self.data[self.start : self.start + self.size]

    def write(self, values: list[Any]) -> None:
        assert len(values) == self.size
        self.data[self.start : self.start + self.size] = values

    def _like(self, shape: tuple[int, ...], start: int | None = None) -> Tensor:
        at = self.start if start is None else start
        return Tensor(self.torch, self.data, shape, at)

    def __getitem__(self, key: Any) -> Tensor:
        row = self.size // self.shape[0]
        if isinstance(key, slice):
            assert key.start is None and 0 < key.stop <= self.shape[0]
            return self._like((key.stop, *self.shape[1:]))
        return self._like(self.shape[1:], self.start + key * row)

    def view(self, *shape: Any) -> Tensor:
        if shape == ("uint8",):
            raw = [byte for value in self.values for byte in struct.pack("<d", value)]
            return Tensor(self.torch, raw, (len(raw),))
        return self._like(shape)

    def unsqueeze(self, _: int) -> Tensor:
        return self._like((1, *self.shape))

    def copy_(self, other: Tensor) -> Tensor:
        assert self.shape == other.shape
        self.torch.launch(lambda: self.write(other.values))
        return self

    def zero_(self) -> Tensor:
        self.torch.launch(lambda: self.write([0] * self.size))
        return self

    def clone(self) -> Tensor:
        return self.torch.zeros(self.shape).copy_(self)

    def __eq__(self, other: object) -> Any:
        return Tensor(self.torch, [value == other for value in self.values], self.shape)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        self.torch.cuda.read_on_host()
        return bool(self.values[0])


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, cuda: GraphCuda) -> None:
        self.cuda = cuda
        self.work: list[Callable[[], None]] = []
        self.pool = 0
        self.state = "new"

    def capture_begin(self, *, pool: int, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert self.cuda.stream_now != "default", "captured on the default stream"
        if pool in self.cuda.uses and self.cuda.uses[pool] == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.cuda.uses[pool] = self.cuda.uses.get(pool, 0) + 1
        self.cuda.pools.setdefault(pool, 0)
        self.pool, self.state = pool, "capturing"
        self.cuda.capturing = self

    def capture_end(self) -> None:
        self.cuda.capturing = None
        if self.state == "broken":
            self.cuda.underway = self.pool
            raise RuntimeError("CUDA error: broken off")
        if self.cuda.loses_work:
            self.work.clear()
        self.state = "captured"
        self.cuda.events.append("captured")

    def replay(self) -> None:
        assert self.state == "captured"
        self.cuda.events.append("replay")
        for step in self.work:
            step()

    def reset(self) -> None:
        assert self.state == "captured"
        self.state = "reset"
        self.cuda.uses[self.pool] -= 1


class GraphCuda:
    """torch.cuda: streams, graphs, pools, and a caching allocator with a limit."""

    def __init__(self) -> None:
        self.limit = 16 * 1024 * MIB
        self.live = 0  # of other tensors than those of a forward
        self.cached = 0
        self.streams = 0
        self.handles = 0
        self.uses: dict[int, int] = {}
        self.pools: dict[int, int] = {}
        self.capturing: Graph | None = None
        self.underway: int | None = None
        self.stream_now = "default"
        self.loses_work = False
        self.reuses_blocks = True  # a later capture in those of an earlier one
        self.events: list[str] = []

    def CUDAGraph(self) -> Graph:
        return Graph(self)

    def Stream(self, index: int) -> str:
        self.streams += 1
        return f"side stream of {index}"

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream
        try:
            yield
        finally:
            self.stream_now = before

    def graph_pool_handle(self) -> int:
        self.handles += 1
        return self.handles

    def synchronize(self, index: int) -> None:
        self.read_on_host()
        self.events.append("synchronize")

    def read_on_host(self) -> None:
        if self.capturing is not None:
            self.capturing.state = "broken"
            raise RuntimeError("CUDA error: capturing")

    def empty_cache(self) -> None:
        if self.underway is not None or self.capturing is not None:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self.cached = 0
        for pool in [pool for pool, uses in self.uses.items() if uses == 0]:
            del self.uses[pool], self.pools[pool]
        self.events.append("empty_cache")

    def use(self, size: int) -> None:
        """Allocate and free `size` bytes: they stay reserved, in the pool if any."""
        graph = self.capturing
        have = self.cached if graph is None else self.pools[graph.pool]
        if graph is not None and not self.reuses_blocks:
            size += have
        if self.memory_reserved() + max(0, size - have) > self.limit:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate some")
        if graph is None:
            self.cached = max(have, size)
        else:
            self.pools[graph.pool] = max(have, size)

    def memory_reserved(self, index: int = 0) -> int:
        return self.live + self.cached + sum(self.pools.values())

    def memory_snapshot(self) -> list[dict[str, Any]]:
        size = self.live + self.cached
        own = [{"segment_pool_id": (0, 0), "total_size": size}]
        return own + [
            {"segment_pool_id": (0, pool), "total_size": size}
            for pool, size in self.pools.items()
        ]


class GraphTorch:
    """The parts of torch that graphs.py, replay.py and memory.py touch."""

    OutOfMemoryError = OutOfMemoryError
    int64, uint8 = "int64", "uint8"

    def __init__(self) -> None:
        self.cuda = GraphCuda()
        self.is_inference = False
        self._C = types.SimpleNamespace(
            _cuda_endAllocateToPool=self._end_allocate,
            _cuda_releasePool=self._release_pool,
        )

    def _end_allocate(self, index: int, pool: int) -> None:
        if self.cuda.underway != pool:
            raise RuntimeError("not currently recording to mempool_id")
        self.cuda.underway = None

    def _release_pool(self, index: int, pool: int) -> None:
        assert self.cuda.uses[pool] > 0
        self.cuda.uses[pool] -= 1

    @contextlib.contextmanager
    def inference_mode(self) -> Iterator[None]:
        before, self.is_inference = self.is_inference, True
        try:
            yield
        finally:
            self.is_inference = before

    def zeros(self, shape: Any, *, device: str = "cuda:0", **_: Any) -> Tensor:
        assert device == "cuda:0"
        shape = shape if isinstance(shape, tuple) else (shape,)
        tensor = Tensor(self, [], shape)
        tensor.data = [0] * tensor.size
        return tensor

    def tensor(self, values: list[Any], *shape: int) -> Tensor:
        return Tensor(self, list(values), shape or (len(values),))

    def all(self, tensor: Tensor) -> Tensor:
        return Tensor(self, [all(tensor.values)], ())

    def equal(self, one: Tensor, other: Tensor) -> bool:
        self.cuda.read_on_host()
        return one.values == other.values

    def launch(self, step: Callable[[], None]) -> None:
        if self.cuda.capturing is None:
            step()
        else:
            self.cuda.capturing.work.append(step)


def _keep(logits: list[float], captured: bool) -> list[float]:
    return logits


class Model:
    """A forward whose logits depend on every token up to each position.

    `transform` plants a fault: from the logits, and whether they are captured work, it
    makes the logits that are written. `baked` is what a captured
    forward reads only once, at its capture: "ids" or "positions".
    """

    def __init__(self, torch: GraphTorch) -> None:
        self.torch = torch
        self.eager_calls = 0
        self.mib_per_token = 1
        self.reads_on_host = False
        self.baked = ""
        self.transform: Callable[[list[float], bool], list[float]] = _keep

    def __call__(
        self, *, input_ids: Any, attention_mask: Any, use_cache: bool, **rest: Any
    ) -> Any:
        positions = rest.get("logits_to_keep")
        cuda, capturing = self.torch.cuda, self.torch.cuda.capturing is not None
        tokens, fields = input_ids.shape[1], len(positions.values)
        if isinstance(attention_mask, dict):
            assert attention_mask == {"full_attention": None, "linear_attention": None}
        else:
            bool(self.torch.all(attention_mask == 1))
        if capturing:
            assert self.torch.is_inference and use_cache is False
        else:
            self.eager_calls += 1
            cuda.events.append("eager")
        if capturing and self.reads_on_host:
            bool(input_ids)
        cuda.use(tokens * self.mib_per_token * MIB)
        logits = self.torch.zeros((1, fields, VOCABULARY))
        baked_ids = input_ids.values if self.baked == "ids" else None
        baked_positions = positions.values if self.baked == "positions" else None

        def kernel() -> None:
            ids = baked_ids or input_ids.values
            values = [
                float(hash((*ids[: at + 1], symbol)) % 65536)
                for at in baked_positions or positions.values
                for symbol in range(VOCABULARY)
            ]
            logits.write(self.transform(values, capturing))

        self.torch.launch(kernel)
        return types.SimpleNamespace(logits=logits)
