"""The real loader on the demo checkpoint, with real torch: load, score, fail, prove."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from intern_decision_serve import checkpoint as checkpoint_module
from intern_decision_serve import engine as engine_module
from intern_decision_serve.demo import DemoCheckpoint
from intern_decision_serve.engine import Engine, load_engine
from intern_decision_serve.errors import (
    InvalidRequest,
    OutOfMemory,
    ScoringFailed,
    StartupRefused,
)
from intern_decision_serve.warmup import WARMUP, find_difference

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.torch

CHOICE = {
    "type": "choice",
    "instructions": "What should happen?",
    "criteria": {"allow": "harmless", "ask": "needs a person", "deny": "destroys"},
}
SCORE = {"type": "score", "instructions": "Risk?", "criteria": ["low", "mid", "high"]}
NOUL = {"type": "noul", "instructions": "Is this reversible?"}
MIXED = {
    "state": {"command": "rm -rf build", "cwd": "/srv/été"},
    "questions": {"safe": NOUL, "risk": SCORE, "gate": CHOICE},
}
LONG = {"state": "the sensor reads " * 900, "questions": {"q": CHOICE, "r": NOUL}}


def load(demo: DemoCheckpoint, **changes: Any) -> Engine:
    arguments: dict[str, Any] = {
        "checkpoint": demo.path,
        "device": "cpu",
        "vram_cap_gib": None,
        "max_tokens": 8192,
        "release_slack_mib": 512,
        "keep_vision": False,
        "allow_slow_kernels": False,
        "warmup_tokens": None,
        "cuda_graphs": 0,
        "cuda_graphs_mib": 0,
        "progress": lambda text: None,
    }
    return load_engine(demo.pins, **{**arguments, **changes})


@pytest.fixture(scope="module", autouse=True)
def keep_generations() -> Iterator[None]:
    """Undo the engine's gc.freeze: this process goes on after it."""
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as it was after collection (conftest)


@pytest.fixture(scope="module")
def engine(demo_checkpoint: DemoCheckpoint) -> Engine:
    return load(demo_checkpoint)


@pytest.fixture(scope="module")
def direct(demo_checkpoint: DemoCheckpoint) -> Any:
    """The checkpoint's own DecisionEngine, loaded beside and used as it comes."""
    source = checkpoint_module.read_inference(
        demo_checkpoint.path, demo_checkpoint.pins
    )
    module = checkpoint_module.execute_inference(source, demo_checkpoint.pins)
    return module.DecisionEngine(demo_checkpoint.path, device="cpu")


@pytest.fixture
def refuse_with(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[], None]], None]:
    """Make every forward but the warm-up's run `step` first."""
    wrapped = engine._forward.wrapped
    warmup_length = len(
        engine._decision_engine.backend.encode(WARMUP)[1]["input_ids"][0]
    )

    def plant(step: Callable[[], None]) -> None:
        def forward(**batch: Any) -> Any:
            if batch["input_ids"].shape[1] != warmup_length:
                step()
            return wrapped(**batch)

        monkeypatch.setattr(engine._forward, "wrapped", forward)

    return plant


@pytest.mark.parametrize("request_", [MIXED, LONG, WARMUP], ids=["mixed", "long", "q"])
def test_an_answer_equals_a_direct_predict_bit_for_bit(
    engine: Engine, direct: Any, request_: dict[str, Any]
) -> None:
    response, _ = engine.score(request_)
    assert find_difference(direct.predict(request_), response) is None


def test_a_repeated_call_answers_the_same_bits(engine: Engine) -> None:
    first, first_hash = engine.score(MIXED)
    again, again_hash = engine.score(MIXED)
    assert find_difference(first, again) is None
    assert first_hash == again_hash


@pytest.mark.parametrize("request_", [MIXED, LONG], ids=["mixed", "long"])
def test_the_prompt_hash_is_of_the_text_that_tokenises_to_the_reported_count(
    engine: Engine, direct: Any, request_: dict[str, Any]
) -> None:
    response, prompt_sha256 = engine.score(request_)
    module = sys.modules[type(direct).__module__]
    compiled = module.compile_row(module.validate_request(request_))
    text = direct.tokenizer.apply_chat_template(
        compiled.messages,
        tokenize=False,
        add_generation_prompt=False,
        enable_thinking=False,
        add_vision_id=True,
    )
    assert prompt_sha256 == hashlib.sha256(text.encode()).hexdigest()
    ids = direct.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == response["usage"]["input_tokens"]


def test_the_vision_tower_is_gone_and_its_stub_raises(engine: Engine) -> None:
    visual = engine._decision_engine.backend.model.model.visual
    assert list(visual.parameters()) == []
    with pytest.raises(RuntimeError, match="vision tower was dropped"):
        visual(torch.zeros(1))
    assert engine.warmup["vision"] == "dropped"


def test_keep_vision_keeps_the_tower_and_the_answers(
    demo_checkpoint: DemoCheckpoint, engine: Engine
) -> None:
    kept = load(demo_checkpoint, keep_vision=True)
    visual = kept._decision_engine.backend.model.model.visual
    assert sum(weight.numel() for weight in visual.parameters()) > 0
    assert find_difference(kept.score(MIXED)[0], engine.score(MIXED)[0]) is None


def test_a_swap_that_changes_the_answer_refuses(
    demo_checkpoint: DemoCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop = engine_module.ladder.drop_vision

    def drop_and_disturb(module: Any, model: Any) -> None:
        drop(module, model)
        with torch.no_grad():
            next(iter(model.model.language_model.parameters())).mul_(1.5)

    monkeypatch.setattr(engine_module.ladder, "drop_vision", drop_and_disturb)
    with pytest.raises(StartupRefused, match=r"answers\.q\..*KEEP_VISION=1"):
        load(demo_checkpoint)


def test_a_token_count_mismatch_refuses(
    demo_checkpoint: DemoCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = engine_module.render_prompt
    monkeypatch.setattr(
        engine_module, "render_prompt", lambda *args: render(*args) + " more"
    )
    with pytest.raises(StartupRefused, match="tokens, predict\\(\\) reports"):
        load(demo_checkpoint)


@pytest.fixture
def snapshot(demo_checkpoint: DemoCheckpoint, tmp_path: Path) -> Path:
    """A writable copy of the snapshot, below a directory of the right names."""
    path = tmp_path / "snapshots" / demo_checkpoint.pins.revision
    shutil.copytree(demo_checkpoint.path, path, symlinks=False)
    return path


def test_one_flipped_byte_of_inference_refuses(
    demo_checkpoint: DemoCheckpoint, snapshot: Path
) -> None:
    code = snapshot / "inference.py"
    source = bytearray(code.read_bytes())
    source[len(source) // 2] ^= 1
    code.chmod(0o644)
    code.write_bytes(source)
    with pytest.raises(StartupRefused, match="sha256"):
        load(demo_checkpoint, checkpoint=str(snapshot))


def test_a_wrong_revision_directory_refuses(
    demo_checkpoint: DemoCheckpoint, snapshot: Path
) -> None:
    other = snapshot.with_name("0" * 40)
    snapshot.rename(other)
    with pytest.raises(StartupRefused, match="snapshots/"):
        load(demo_checkpoint, checkpoint=str(other))


def test_other_pins_than_the_files_refuse(demo_checkpoint: DemoCheckpoint) -> None:
    pins = dataclasses.replace(demo_checkpoint.pins, inference_sha256="0" * 64)
    with pytest.raises(StartupRefused, match="sha256"):
        load(DemoCheckpoint(demo_checkpoint.path, pins))


def test_loading_changes_nothing_in_a_read_only_directory(
    demo_checkpoint: DemoCheckpoint, snapshot: Path
) -> None:
    for path in (*snapshot.iterdir(), snapshot):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted((p.name, p.stat().st_mtime_ns) for p in snapshot.iterdir())
    try:
        load(demo_checkpoint, checkpoint=str(snapshot)).score(MIXED)
        after = sorted((p.name, p.stat().st_mtime_ns) for p in snapshot.iterdir())
    finally:
        snapshot.chmod(0o755)
    assert after == before
    assert str(snapshot) not in sys.path


def test_the_token_limit_refuses_with_the_models_message(
    demo_checkpoint: DemoCheckpoint,
) -> None:
    short = load(demo_checkpoint, max_tokens=256)
    with pytest.raises(InvalidRequest, match="limit is 256") as refusal:
        short.score(LONG)
    assert refusal.value.__context__ is None
    with pytest.raises(InvalidRequest, match="limit is 256"):
        short.prepare(LONG)
    assert short.score(WARMUP)


def test_the_decision_token_in_the_state_never_reaches_the_model(
    engine: Engine, refuse_with: Any
) -> None:
    refuse_with(lambda: pytest.fail("the model was called"))
    with pytest.raises(InvalidRequest, match="<decision> is reserved"):
        engine.score({**MIXED, "state": "a <decision> here"})


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory),
        (RuntimeError("CUDA out of memory. Tried to"), OutOfMemory),
        (RuntimeError("mat1 and mat2"), ScoringFailed),
        (ValueError("inside the forward"), InvalidRequest),
    ],
    ids=str,
)
def test_a_failed_call_lets_its_tensors_die_and_the_next_one_answers(
    engine: Engine,
    refuse_with: Any,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    expected: type[Exception],
) -> None:
    sentinels: list[weakref.ref[Any]] = []

    def fail() -> None:
        held = torch.zeros(1024)
        cycle = [held]
        cycle.append(cycle)  # type: ignore[arg-type]
        sentinels.append(weakref.ref(held))
        raise type(error)(*error.args)

    with monkeypatch.context():
        refuse_with(fail)
        with pytest.raises(expected) as failure:
            engine.score(MIXED)
    assert failure.value.__context__ is failure.value.__cause__ is None
    assert sentinels[0]() is None
    monkeypatch.undo()
    assert engine.score(MIXED)


def test_a_readout_that_is_no_distribution_is_the_models_fault(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = engine._forward.wrapped
    length = engine.score(WARMUP)[0]["usage"]["input_tokens"]

    def spoil(**batch: Any) -> Any:
        output = wrapped(**batch)
        if batch["input_ids"].shape[1] != length:
            output.logits = output.logits * float("nan")
        return output

    monkeypatch.setattr(engine._forward, "wrapped", spoil)
    with pytest.raises(ScoringFailed) as failure:
        engine.score(MIXED)
    assert failure.value.message == "the model failed to score this request"


def test_a_call_encoded_ahead_on_another_thread_answers_the_same_bits(
    engine: Engine, direct: Any
) -> None:
    with ThreadPoolExecutor(1) as encoder:
        prepared = encoder.submit(engine.prepare, LONG).result()
    assert prepared is not None
    ahead, ahead_hash = engine.score(LONG, prepared)
    plain, plain_hash = engine.score(LONG)
    assert find_difference(plain, ahead) is None
    assert find_difference(direct.predict(LONG), ahead) is None
    assert ahead_hash == plain_hash


def test_a_prepared_call_is_not_encoded_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = engine.prepare(LONG)

    def encode(row: Any) -> None:
        pytest.fail("encoded again")

    monkeypatch.setattr(engine._encode, "_encode", encode)
    assert engine.score(LONG, prepared)


def test_no_tokenizer_object_is_used_by_two_threads(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: dict[int, set[int]] = {}
    tokenizer_class = type(engine._decision_engine.tokenizer)
    call = tokenizer_class.__call__
    render = tokenizer_class.apply_chat_template

    def spy(original: Any) -> Any:
        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            used.setdefault(id(self), set()).add(threading.get_ident())
            return original(self, *args, **kwargs)

        return watched

    monkeypatch.setattr(tokenizer_class, "__call__", spy(call))
    monkeypatch.setattr(tokenizer_class, "apply_chat_template", spy(render))
    with ThreadPoolExecutor(1) as encoder:
        futures = [encoder.submit(engine.prepare, LONG) for _ in range(3)]
        for future in futures:
            engine.score(MIXED)
            engine.score(LONG, future.result())
    assert len(used) == 2
    assert [len(threads) for threads in used.values()] == [1, 1]


def test_a_ladder_that_is_asked_for_is_climbed_on_the_cpu(
    demo_checkpoint: DemoCheckpoint,
) -> None:
    told: list[str] = []
    climbed = load(demo_checkpoint, warmup_tokens=(256, 1024), progress=told.append)
    rungs = climbed.warmup["rungs"]
    assert all(rung["outcome"] == "scored" for rung in rungs)
    assert {rung["tokens"] // 250 for rung in rungs} == {1, 4}
    assert all(rung["tokens"] <= 1024 for rung in rungs)
    assert told[-1] == "warm-up ladder 2/2: 1024 tokens"


def test_the_description_names_the_demo_and_its_libraries(
    engine: Engine, demo_checkpoint: DemoCheckpoint
) -> None:
    template = Path(demo_checkpoint.path) / "chat_template.jinja"
    expected = {
        "name": "Intern-Decision-Demo",
        "revision": demo_checkpoint.pins.revision,
        "dtype": "bfloat16",
        "device": "cpu",
        "torch_version": torch.__version__,
        "transformers_version": "5.17.0",
        "inference_sha256": demo_checkpoint.pins.inference_sha256,
    }
    assert expected.items() <= engine.description.items()
    if template.exists():
        text = template.read_bytes()
        found = engine.description["chat_template_sha256"]
        assert found == hashlib.sha256(text).hexdigest()


def test_every_kernel_is_reported_with_what_transformers_bound(engine: Engine) -> None:
    assert {name: report["package"] for name, report in engine.kernels.items()} == {
        "chunk_gated_delta_rule": "transformers",
        "fused_recurrent_gated_delta_rule": "transformers",
        "causal_conv1d_fn": "transformers",
        "causal_conv1d_update": "transformers",
    }
    assert all(report["version"] == "5.17.0" for report in engine.kernels.values())


def test_no_token_is_longer_than_the_longest_token(engine: Engine) -> None:
    tokenizer = engine._decision_engine.tokenizer
    text = " ".join(tokenizer.get_vocab()) + " deliberately " * 50
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert max(len(tokenizer.decode([token])) for token in ids) <= engine.longest_token
    assert len(text) <= len(ids) * engine.longest_token


def test_the_canary_passes_on_a_well_engine(engine: Engine) -> None:
    engine.canary()


def test_a_checkpoint_without_weights_refuses_in_one_line(
    demo_checkpoint: DemoCheckpoint, snapshot: Path
) -> None:
    for path in snapshot.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(StartupRefused, match="the checkpoint does not load: ") as no:
        load(demo_checkpoint, checkpoint=str(snapshot))
    assert "\n" not in str(no.value)


def test_cuda_that_is_not_there_is_absent(demo_checkpoint: DemoCheckpoint) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(StartupRefused, match="INTERN_DECISION_DEVICE is 'cuda'") as no:
        load(demo_checkpoint, device="cuda")
    assert no.value.exit_status == 75
