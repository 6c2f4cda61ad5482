"""The engine: the pinned model on its device, loaded fail-closed, scored, kept clean.

    load_engine: read, import, cap, load, placement and architecture, settle, reference,
                 drop the tower, re-score, prompt check, ladder, baseline
    score:       prompt text and hash -> predict() -> response unchanged, or one error

All of it runs on the one inference thread, but for `validate` and `prepare`. It must
never change a number, write a prompt, or let a failed call's tensors live (INV-1, 4).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from . import device as card
from . import kernels as fast_kernels
from . import loading
from . import warmup as ladder
from .checkpoint import execute_inference, read_inference
from .encoder import EncodeAhead, Prepared, Preparer, is_worth_preparing, make_preparer
from .errors import (
    EngineFailed,
    InvalidRequest,
    OutOfMemory,
    ScoringFailed,
    ServiceError,
)
from .memory import (
    Memory,
    drop_frames,
    format_failure,
    is_context_lost,
    is_out_of_memory,
)
from .pins import ModelPins
from .prompt import check_token_count, hash_prompt, render_prompt, run_client_step
from .replay import Forward, make_replay

__all__ = ["Engine", "load_engine"]

_log = logging.getLogger(__name__)

Request = dict[str, Any]
LOST = "the engine is lost"


class Engine:
    """One loaded checkpoint; `score`, `canary` and `memory` on the inference thread."""

    def __init__(
        self, torch: Any, inference: Any, decision_engine: Any, memory: Memory
    ) -> None:
        self.description: dict[str, Any] = {}
        self.kernels: dict[str, dict[str, Any]] = {}
        self.warmup: dict[str, Any] = {}
        self.longest_token = 0
        self._torch = torch
        self._inference = inference
        self._decision_engine = decision_engine
        self._memory = memory
        self._reference: dict[str, Any] | None = None
        self._lost = False
        backend = decision_engine.backend
        self._preparer: Preparer | None = None
        self._encode = EncodeAhead(backend.encode, backend.device)
        self._forward = Forward(backend.model)
        backend.encode, backend.model = self._encode, self._forward

    def score(
        self, request: Request, prepared: Prepared | None = None
    ) -> tuple[dict[str, Any], str]:
        """Score one call: predict()'s response untouched, and its prompt's sha256.

        `prepared` is used if it was made of this very request. Raises InvalidRequest,
        OutOfMemory, ScoringFailed or EngineFailed, each unchained (INV-4).
        """
        self._check_lost()
        if prepared is not None and prepared.request is not request:
            prepared = None
        if prepared is None:
            prompt_sha256 = run_client_step(lambda: hash_prompt(self._render(request)))
        else:
            prompt_sha256 = prepared.prompt_sha256
        return self._predict(request, prepared), prompt_sha256

    def validate(self, request: Request) -> None:
        """Run the pinned validate_request alone: pure Python, on a handler thread."""
        run_client_step(lambda: self._inference.validate_request(request))

    def prepare(self, request: Request) -> Prepared | None:
        """Encode a long call ahead, on the encoder thread; None leaves a short one.

        Raises InvalidRequest for what the pinned code refuses, its token limit too.
        """
        preparer = self._preparer
        if preparer is None or not is_worth_preparing(request):
            return None
        return run_client_step(lambda: preparer.prepare(request))

    @property
    def graphs(self) -> dict[str, Any] | None:
        """What `/health` tells of replay, from any thread; None where it is off."""
        replay = self._forward.replay
        return None if replay is None else replay.counters()

    @property
    def is_capture_due(self) -> bool:
        """Whether `after_answer` has something to do."""
        return self._forward.replay is not None and self._forward.replay.is_due

    def after_answer(self) -> None:
        """Capture a shape that recurs, once its answer is out.

        One that failed ends replay for the life of the process, and the warm-up tells
        whether the engine is well: raises EngineFailed.
        """
        replay = self._forward.replay
        fault = None if replay is None or self._lost else replay.capture()
        if fault is not None:
            self._end_replay(fault)
            self.canary()

    def canary(self) -> None:
        """Score the warm-up again; EngineFailed if it fails or differs by one bit."""
        self._check_lost()
        try:
            with self._forward.eager():
                response = self._decision_engine.predict(ladder.WARMUP)
            difference = ladder.find_difference(self._reference, response)
        except Exception as error:
            difference = f"it fails: {type(error).__name__}"
            _log.error("the warm-up fails:\n%s", format_failure(error))
            drop_frames(error)
        if difference is not None:
            self._lose(f"the warm-up no longer scores as it did: {difference}")

    def warm_up(
        self,
        lengths: tuple[int, ...],
        *,
        keep_vision: bool,
        progress: Callable[[str], None],
    ) -> None:
        """Score until ready to serve; the order is that of decisions.md.

        Raises StartupRefused, or the ServiceError that a warm-up call met.
        """
        started = time.perf_counter()
        progress("settling the warm-up")
        reference, calls = ladder.settle(self.score)
        seconds = round(time.perf_counter() - started, 3)
        if not keep_vision:
            progress("dropping the vision tower")
            ladder.drop_vision(self._torch, self._forward.wrapped)
            self._memory.release()
            ladder.check_same(reference, self.score(ladder.WARMUP)[0])
        check_token_count(
            self._decision_engine.tokenizer,
            self._render(ladder.WARMUP),
            int(reference["usage"]["input_tokens"]),
        )
        self._reference = reference
        rungs = ladder.climb(lengths, self.score, self._count_tokens, progress)
        self.canary()
        vision = "kept" if keep_vision else "dropped"
        settled = {"settle_calls": calls, "settle_seconds": seconds}
        self.warmup = {**settled, "vision": vision, "rungs": rungs}
        self._preparer = make_preparer(
            self._inference, self._decision_engine.backend, self._encode
        )
        if self._forward.replay is not None:
            progress("capturing the warm-up")
            self._start_replay(reference)
        self._memory.set_baseline()

    def _start_replay(self, reference: dict[str, Any]) -> None:
        self._forward.is_eager = False
        fault = ladder.find_replay_fault(self.score, self.after_answer, reference)
        graphs = self.graphs  # None after a capture that failed
        if graphs is not None and (fault or not graphs["hits"]):
            self._end_replay(fault or "the warm-up is not captured")
        self.canary()

    def _end_replay(self, reason: str) -> None:
        """Switch replay off until the process ends; release what it held."""
        _log.warning("replay is off: %s", reason)
        self._release_failed()
        self._forward.replay = None

    def memory(self) -> dict[str, float | None]:
        """Read the allocator's counters in MiB; None throughout on the CPU."""
        return self._memory.counters()

    def _render(self, request: Request) -> str:
        tokenizer = self._decision_engine.tokenizer
        return render_prompt(self._inference, tokenizer, request)

    def _count_tokens(self, request: Request) -> int:
        tokenizer = self._decision_engine.tokenizer
        text = self._render(request)
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _predict(self, request: Request, prepared: Prepared | None) -> dict[str, Any]:
        """Run predict(); sort, log and release a failure (INV-4).

        The failure to raise is made of plain strings inside the handler and raised
        after it: by then nothing refers to the failed call's frames.
        """
        self._forward.returned = False
        self._encode.prepared = prepared
        try:
            response: dict[str, Any] = self._decision_engine.predict(request)
            self._memory.release_excess()
            return response
        except Exception as error:
            failure = self._sort(error)
            drop_frames(error)
        finally:
            self._encode.prepared = None
        if isinstance(failure, EngineFailed):
            raise failure
        dropped = self._release_failed(drop=not isinstance(failure, InvalidRequest))
        if dropped and isinstance(failure, OutOfMemory):
            return self._predict(request, prepared)  # it may fit without the graphs
        if isinstance(failure, ScoringFailed) and self._reference is not None:
            self.canary()
        raise failure

    def _sort(self, error: Exception) -> ServiceError:
        """Name the failure for the client; the text tells nothing of the inside."""
        if is_out_of_memory(self._torch, error):
            _log.warning("out of memory: %s", str(error).partition("\n")[0])
            return OutOfMemory("the request does not fit in the GPU's memory")
        if is_context_lost(self._torch, error):
            self._lost = True
            _log.critical("the engine is lost:\n%s", format_failure(error))
            return EngineFailed(LOST)
        if isinstance(error, ValueError) and not self._forward.returned:
            return InvalidRequest(str(error) or "the model refuses this request")
        _log.error("predict() failed:\n%s", format_failure(error))
        return ScoringFailed("the model failed to score this request")

    def _release_failed(self, *, drop: bool = True) -> bool:
        """Free what the failed call held (INV-4); whether graphs were dropped too."""
        try:
            replay = self._forward.replay
            dropped = drop and replay is not None and replay.drop()
            self._memory.release()
            return dropped
        except Exception as error:
            reason = f"memory cannot be released: {type(error).__name__}"
            _log.error("%s\n%s", reason, format_failure(error))
            drop_frames(error)
        self._lose(reason)

    def _check_lost(self) -> None:
        if self._lost:
            raise EngineFailed(LOST)

    def _lose(self, reason: str) -> NoReturn:
        self._lost = True
        _log.critical("the engine is lost: %s", reason)
        raise EngineFailed(LOST)


def load_engine(
    pins: ModelPins,
    *,
    checkpoint: str,
    device: str,
    vram_cap_gib: float | None,
    max_tokens: int,
    release_slack_mib: int,
    keep_vision: bool,
    allow_slow_kernels: bool,
    warmup_tokens: tuple[int, ...] | None,
    cuda_graphs: int,
    cuda_graphs_mib: int,
    progress: Callable[[str], None],
) -> Engine:
    """Load, check and warm up on the calling thread; every later call belongs to it.

    Raises StartupRefused (78) or DeviceAbsent (75), one line each.
    """
    source = read_inference(checkpoint, pins)
    card.drop_expandable_segments(os.environ)
    if card.is_cuda(device):
        fast_kernels.check_triton(os.environ)
    progress("importing torch and the checkpoint's code")
    torch = loading.import_torch()
    inference = execute_inference(source, pins)
    index = card.select_device(torch, device)
    is_cuda = index is not None
    kernels = fast_kernels.report_kernels(is_cuda, allow_slow=allow_slow_kernels)
    card.apply_cap(torch, index, vram_cap_gib)
    progress("loading the weights")
    build = partial(
        inference.DecisionEngine, checkpoint, max_length=max_tokens, device=device
    )
    decision_engine = loading.construct(torch, build, index, vram_cap_gib)
    card.check_model(torch, decision_engine.backend.model, index)
    memory = Memory(torch, index, slack_mib=release_slack_mib)
    engine = Engine(torch, inference, decision_engine, memory)
    bounds = {"most": cuda_graphs, "pool_mib": cuda_graphs_mib}
    forward = engine._forward
    forward.replay = make_replay(torch, index, forward.call_model, memory, **bounds)
    engine.kernels = kernels
    engine.description = loading.describe(pins, torch, decision_engine, index)
    engine.longest_token = loading.find_longest_token(decision_engine.tokenizer)
    lengths = ladder.choose_lengths(warmup_tokens, max_tokens, is_cuda=is_cuda)
    loading.refuse_service_errors(
        lambda: engine.warm_up(lengths, keep_vision=keep_vision, progress=progress)
    )
    return engine
