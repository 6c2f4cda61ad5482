"""Stands where the checkpoint's code calls its model: eager, or a captured graph.

    a call of a held shape    inputs copied in, one replay, logits copied out
    a shape seen before       the model itself; inputs and logits are kept as a sample
    any other call            the model itself
    after the answer is out   the sample's shape is captured, replayed once on the
                              sample, compared bit for bit, and only then held

A shape is (tokens, fields), exactly. Everything runs on the inference thread. It must
never answer from a graph that was not compared, nor change a number (INV-1), nor keep
memory that a call needs: an out-of-memory error drops every graph first (INV-4).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .graphs import MOST_FIELDS, Recorder, Sample, Shape
from .memory import Memory, drop_frames

__all__ = ["LONGEST_TOKENS", "Forward", "Output", "Replay", "make_replay"]

_log = logging.getLogger(__name__)

# Measured (H200, 4B), eager against replay: 300 tokens 58 and 13 ms, 1,000 56 and 28,
# 2,000 57 and 51, 3,000 94 and 75, 4,000 106 and 99 (103 and 108 another time): there
# the launches hide behind the GPU's work, and one graph takes 0.4 GiB.
LONGEST_TOKENS = 3000
MOST_SEEN = 4096  # shapes remembered as seen once
CAPTURE_SHARE = 0.1  # of the time: shapes that come and go cost the others little
MOST_CREDIT_SECONDS = 5.0

ARGUMENTS = {"input_ids", "attention_mask", "use_cache", "logits_to_keep"}


@dataclass(frozen=True, slots=True)
class Output:
    """All that the checkpoint's code reads of a model's output: 1 x fields x vocab."""

    logits: Any


class Forward:
    """Stands in for `backend.model`: the same call, and whether it has returned.

    A ValueError is the request's fault up to there, the model's afterwards; one of
    replay's own code is never the request's.
    """

    def __init__(self, model: Any) -> None:
        self.wrapped = model  # not `model`: that is a name of the model itself
        self.returned = False
        self.replay: Replay | None = None
        self.is_eager = True  # until the warm-up is done

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.replay is None or self.is_eager:
            return self.call_model(*args, **kwargs)
        self.returned = True
        return self.replay(*args, **kwargs)

    def call_model(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model itself: what replay does with a call that it leaves alone."""
        self.returned = False
        output = self.wrapped(*args, **kwargs)
        self.returned = True
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    @contextlib.contextmanager
    def eager(self) -> Iterator[None]:
        """Inside, no call is replayed: the canary asks the model itself."""
        was_eager, self.is_eager = self.is_eager, True
        try:
            yield
        finally:
            self.is_eager = was_eager


class Allowance:
    """Seconds that captures may take: a share of the time that passes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._credit = MOST_CREDIT_SECONDS
        self._accrued_at = clock()

    def is_left(self) -> bool:
        """Whether a capture may start now."""
        now = self._clock()
        self._credit += (now - self._accrued_at) * CAPTURE_SHARE
        self._credit = min(self._credit, MOST_CREDIT_SECONDS)
        self._accrued_at = now
        return self._credit > 0

    @contextlib.contextmanager
    def spend(self) -> Iterator[None]:
        """Charge what is done inside."""
        started = self._clock()
        try:
            yield
        finally:
            self._credit -= self._clock() - started


class Replay:
    """Graphs of the shapes that recur; the least recently used go.

    `most` bounds their number, `pool_mib` the memory of the one pool that they share.
    """

    def __init__(
        self,
        torch: Any,
        index: int,
        model: Any,
        memory: Memory,
        *,
        most: int,
        pool_mib: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._torch = torch
        self._model = model
        self._memory = memory
        self._most = most
        self._pool_bytes = pool_mib * 2**20
        self._allowance = Allowance(clock)
        self._recorder = Recorder(torch, index, model, LONGEST_TOKENS)
        self._graphs: OrderedDict[Shape, Any] = OrderedDict()
        self._seen: OrderedDict[Shape, None] = OrderedDict()
        self._refused: set[Shape] = set()
        self._longest = LONGEST_TOKENS
        self._sample: Sample | None = None
        self._hits = self._captures = self._evictions = self._drops = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, or replay the graph of this call's shape."""
        shape = None if args else _find_shape(kwargs)
        if shape is None or shape[0] > self._longest or shape in self._refused:
            return self._model(*args, **kwargs)
        graph = self._graphs.get(shape)
        if graph is None and not self._was_seen(shape):
            return self._model(**kwargs)
        mask = kwargs["attention_mask"]
        if not self._torch.all(mask == 1):  # as the eager call asks; see NO_MASKS
            return self._model(**kwargs)
        if graph is None:
            return self._call_and_keep(shape, kwargs)
        input_ids, positions = kwargs["input_ids"], kwargs["logits_to_keep"]
        logits = self._recorder.run(graph, shape, input_ids, positions)
        self._graphs.move_to_end(shape)
        self._hits += 1
        return Output(logits.unsqueeze(0))

    @property
    def is_due(self) -> bool:
        """Whether `capture` has a shape to capture, and time for it."""
        return self._sample is not None and self._allowance.is_left()

    def capture(self) -> str | None:
        """Capture the sample's shape; None, or what failed.

        Called once the answer is out. After a failure this object is not to be called
        again: what is left of a capture that broke off is in doubt (see `Recorder`).
        """
        sample, self._sample = self._sample, None
        if sample is None:
            return None
        with self._allowance.spend():
            try:
                self._hold(sample)
                return None
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                drop_frames(error)
        tokens, fields = sample.shape
        return f"capturing {tokens} tokens, {fields} fields: {reason}"

    def drop(self) -> bool:
        """Give up every graph, for the next release to free; whether any was held."""
        self._sample = None
        dropped = list(self._graphs.items())
        self._graphs.clear()
        self._drops += len(dropped)
        for shape, graph in dropped:
            self._forget(shape, graph)
        return bool(dropped)

    def counters(self) -> dict[str, Any]:
        """What `/health` shows; any thread, no torch."""
        return {
            "most": self._most,
            "held": len(self._graphs),
            "pool_mib": round(self._memory.graph_pool / 2**20, 1),
            "hits": self._hits,
            "captures": self._captures,
            "refusals": len(self._refused),
            "evictions": self._evictions,
            "drops": self._drops,
        }

    def _was_seen(self, shape: Shape) -> bool:
        if shape in self._seen:
            self._seen.move_to_end(shape)
            return True
        self._seen[shape] = None
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        return False

    def _call_and_keep(self, shape: Shape, kwargs: dict[str, Any]) -> Any:
        """Call the model and copy the call; one sample waits at a time."""
        output = self._model(**kwargs)
        if self._sample is None and tuple(output.logits.shape[:2]) == (1, shape[1]):
            self._sample = Sample(
                shape,
                kwargs["input_ids"].clone(),
                kwargs["logits_to_keep"].clone(),
                output.logits[0].clone(),
            )
        return output

    def _hold(self, sample: Sample) -> None:
        """Capture, compare, then hold or refuse; raises what the capture met."""
        while len(self._graphs) >= self._most:
            self._evictions += 1
            self._forget(*self._graphs.popitem(last=False))
        graph = self._recorder.record(sample, is_first=not self._graphs)
        self._captures += 1
        is_same = self._recorder.is_same(sample, graph)
        pool_bytes = self._memory.count_graph_pool()
        if not is_same:
            graph.reset()
            self._refuse(sample.shape, "a replay differs from the eager call")
        elif pool_bytes > self._pool_bytes:
            graph.reset()
            self._shed(sample.shape)
        else:
            self._graphs[sample.shape] = graph
        if not self._graphs:
            self._memory.release()

    def _shed(self, shape: Shape) -> None:
        """Free the pool, which is over its bound: it shrinks only as a whole.

        A shape that is over it alone is too long, and so is every longer one.
        """
        if not self.drop():
            self._refuse(
                shape, "its graph alone is over INTERN_DECISION_CUDA_GRAPHS_MIB"
            )
            self._longest = min(self._longest, shape[0] - 1)

    def _refuse(self, shape: Shape, reason: str) -> None:
        self._refused.add(shape)
        _log.warning("%d tokens, %d fields: not replayed: %s", *shape, reason)

    def _forget(self, shape: Shape, graph: Any) -> None:
        """Give one graph back; its shape starts over as one never seen."""
        self._seen.pop(shape, None)
        graph.reset()


def make_replay(
    torch: Any,
    index: int | None,
    model: Any,
    memory: Memory,
    *,
    most: int,
    pool_mib: int,
) -> Replay | None:
    """Build it where it is asked for; on the CPU there is one warning instead."""
    if most and index is None:
        _log.warning("INTERN_DECISION_CUDA_GRAPHS is ignored: the device is no GPU")
    if not most or index is None:
        return None
    return Replay(torch, index, model, memory, most=most, pool_mib=pool_mib)


def _find_shape(kwargs: dict[str, Any]) -> Shape | None:
    """Name the shape of a call as the pinned code makes it; None for any other."""
    if set(kwargs) != ARGUMENTS or kwargs["use_cache"] is not False:
        return None
    names = ("input_ids", "attention_mask", "logits_to_keep")
    ids, mask, positions = (tuple(getattr(kwargs[n], "shape", ())) for n in names)
    if len(ids) != 2 or ids[0] != 1 or mask != ids or len(positions) != 1:
        return None
    tokens, fields = ids[1], positions[0]
    return (tokens, fields) if 0 < fields <= MOST_FIELDS else None
