"""CUDA graphs of the model's forward: recorded, replayed, compared, given back.

It owns the static tensors and the one memory pool that all graphs share, and knows what
torch and transformers do while a stream captures. Inference thread only. It must never
leave the allocator in a capture that broke off, nor decide which shape is worth one.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

__all__ = ["MOST_FIELDS", "Recorder", "Sample", "Shape"]

MOST_FIELDS = 16  # the pinned code takes no more in a call

# Facts (transformers 5.17.0, modeling_qwen3_5 and masking_utils). For a mask of ones
# the eager call asks the device twice whether it is all ones, then uses no mask at all.
# While a stream captures it does not ask, and builds masks: other kernels, other bits.
# A mapping is taken as it is, so this one names the eager call's own outcome. Nothing
# else depends on values: without pictures positions count up from 0, and there are no
# rope deltas.
NO_MASKS = {"full_attention": None, "linear_attention": None}

Shape = tuple[int, int]  # tokens, fields


@dataclass(frozen=True, slots=True)
class Sample:
    """One eager call's inputs and logits, copied: what its shape is compared on."""

    shape: Shape
    input_ids: Any
    positions: Any
    logits: Any


class Buffers:
    """The static tensors that every graph reads and writes, as large as any needs.

    One set serves all: graphs never run at once, and what a replay wrote is copied out
    before the next. At 16 fields the 4B's logits alone are 8 MiB.
    """

    def __init__(self, torch: Any, logits: Any, most_tokens: int) -> None:
        vocabulary, device = logits.shape[-1], logits.device
        self._ids = torch.zeros(most_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(MOST_FIELDS, dtype=torch.int64, device=device)
        self._logits = torch.zeros(
            (MOST_FIELDS, vocabulary), dtype=logits.dtype, device=device
        )

    def clear(self) -> None:
        """Zero all, so that neither a baked-in input nor an old answer can pass."""
        self._ids.zero_()
        self._positions.zero_()
        self._logits.zero_()

    def forward(self, model: Any, shape: Shape) -> None:
        """Run the model from buffer to buffer: the work that is captured."""
        tokens, fields = shape
        output = model(
            input_ids=self._ids[:tokens].view(1, tokens),
            attention_mask=NO_MASKS,
            use_cache=False,
            logits_to_keep=self._positions[:fields],
        )
        self._logits[:fields].copy_(output.logits[0])

    def run(self, graph: Any, shape: Shape, input_ids: Any, positions: Any) -> Any:
        """Replay on these inputs; the logits returned (fields x vocab) are a copy."""
        tokens, fields = shape
        self._ids[:tokens].copy_(input_ids.view(tokens))
        self._positions[:fields].copy_(positions)
        graph.replay()
        return self._logits[:fields].clone()


class Recorder:
    """Records graphs of one model into one pool; a new pool after the last one went."""

    def __init__(self, torch: Any, index: int, model: Any, most_tokens: int) -> None:
        self._torch = torch
        self._index = index
        self._model = model
        self._most_tokens = most_tokens
        self._buffers: Buffers | None = None
        self._stream: Any = None
        self._pool: Any = None

    def record(self, sample: Sample, *, is_first: bool) -> Any:
        """Capture one forward of the sample's shape; raises what the capture met.

        `is_first`: no other graph is held. The allocator forgets a pool with its last
        graph, so this one gets a new pool.
        """
        if self._buffers is None:
            self._buffers = Buffers(self._torch, sample.logits, self._most_tokens)
            self._stream = self._torch.cuda.Stream(self._index)
        if is_first:
            self._pool = self._torch.cuda.graph_pool_handle()
        self._buffers.clear()
        self._torch.cuda.synchronize(self._index)
        self._torch.cuda.empty_cache()  # a capture that runs short cannot do it itself
        return self._capture(self._buffers, sample.shape)

    def run(self, graph: Any, shape: Shape, input_ids: Any, positions: Any) -> Any:
        """Replay a recorded graph: logits, fields x vocab."""
        if self._buffers is None:
            raise RuntimeError("nothing was recorded")
        return self._buffers.run(graph, shape, input_ids, positions)

    def is_same(self, sample: Sample, graph: Any) -> bool:
        """Whether one replay on the sample's inputs gives its logits, bit for bit.

        Bytes are compared: values would call 0.0 and -0.0 equal, and a NaN unequal.
        """
        replayed = self.run(graph, sample.shape, sample.input_ids, sample.positions)
        raw = self._torch.uint8
        return bool(self._torch.equal(sample.logits.view(raw), replayed.view(raw)))

    def _capture(self, buffers: Buffers, shape: Shape) -> Any:
        graph = self._torch.cuda.CUDAGraph()
        # torch's own context manager stays on its stream when a capture breaks off.
        with self._torch.cuda.stream(self._stream), self._torch.inference_mode():
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                buffers.forward(self._model, shape)
            except Exception:
                with contextlib.suppress(Exception):  # only tells of the first failure
                    self._end(graph)
                    graph.reset()
                raise
            self._end(graph)
        return graph

    def _end(self, graph: Any) -> None:
        """End a capture, a broken one too.

        Facts (as read in torch 2.10 to 2.12): where CUDA broke a capture off,
        `capture_end` may raise before it tells the allocator, whose next `empty_cache`
        is then an internal assertion. Telling it twice raises, and must not release
        the pool twice. What else stays differs: the pool may remain reserved, pinned
        host memory routed to it, cuBLAS's workspace freed under other graphs. So this
        lets eager calls go on; nothing is to be captured or replayed afterwards.
        """
        try:
            graph.capture_end()
        except Exception:
            with contextlib.suppress(RuntimeError):
                core = self._torch._C
                core._cuda_endAllocateToPool(self._index, self._pool)
                core._cuda_releasePool(self._index, self._pool)
            raise
