"""The demo checkpoint and its own inference code, on real torch."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from intern_decision_serve.demo import (
    DemoCheckpoint,
    checkpoint,
    make_checkpoint,
    weights,
)
from intern_decision_serve.demo.tokenizer import SPECIAL_TOKENS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from intern_decision_serve.demo import inference  # noqa: E402

pytestmark = pytest.mark.torch

CHOICE = {
    "type": "choice",
    "instructions": "What next?",
    "criteria": {"refund": "Pay it back", "replace": "Send another", "wait": None},
}
SCORE = {"type": "score", "instructions": "How urgent?", "criteria": ["low", "high"]}
NOUL = {"type": "noul", "instructions": "Is the customer angry?"}
REQUEST = {
    "state": {"text": "Il est cassé", "tries": [1, 2.5, None]},
    "questions": {"q1": CHOICE, "q2": SCORE, "q3": NOUL},
}


def ask(question: Any, state: Any = "s", name: Any = "q") -> dict[str, Any]:
    return {"state": state, "questions": {name: question}}


@pytest.fixture(scope="module")
def engine(demo_checkpoint: DemoCheckpoint) -> inference.DecisionEngine:
    return inference.DecisionEngine(demo_checkpoint.path, device="cpu")


class TestValidation:
    @pytest.mark.parametrize(
        ("request_", "message"),
        [
            ([], "the request must be an object"),
            ({"questions": {"q": NOUL}}, "the request has no state"),
            ({"state": "s"}, "questions must be an object"),
            ({"state": "s", "questions": [NOUL]}, "questions must be an object"),
            (
                {"state": "s", "questions": {}},
                "questions must hold 1 to 16 fields, not 0",
            ),
            (
                {"state": "s", "questions": {f"q{i}": NOUL for i in range(17)}},
                "questions must hold 1 to 16 fields, not 17",
            ),
            (
                {**REQUEST, "images": ["a.png"]},
                "images are not supported: this checkpoint reads text only",
            ),
            (ask(NOUL, name=""), "field names must be nonempty strings"),
            (ask(NOUL, name=7), "field names must be nonempty strings"),
            (ask("noul"), "question 'q' must be an object"),
            (ask({}), "question 'q': type must be choice, score or noul"),
            (
                ask({"type": "box"}),
                "question 'q': type must be choice, score or noul",
            ),
            (
                ask({"type": "choice", "criteria": ["a", "b"]}),
                "question 'q': choice criteria must be an object",
            ),
            (
                ask({"type": "choice"}),
                "question 'q': choice criteria must be an object",
            ),
            (
                ask({"type": "score", "criteria": "low"}),
                "question 'q': score criteria must be a list or an object",
            ),
            (
                ask({"type": "score", "criteria": {"inf": "x"}}),
                "question 'q': score values must be finite numbers",
            ),
            (
                ask({"type": "score", "criteria": {"high": "x"}}),
                "question 'q': score values must be finite numbers",
            ),
            (
                ask({"type": "score", "criteria": []}),
                "question 'q': 0 options, not 1 to 62",
            ),
            (
                ask({"type": "choice", "criteria": {str(i): "" for i in range(63)}}),
                "question 'q': 63 options, not 1 to 62",
            ),
        ],
    )
    def test_a_wrong_shape_is_refused(self, request_: Any, message: str) -> None:
        with pytest.raises(ValueError) as refusal:
            inference.validate_request(request_)
        assert str(refusal.value) == message

    @pytest.mark.parametrize("state", ["", {}, [], 0, None, False])
    def test_an_empty_state_passes(self, state: Any) -> None:
        row = inference.validate_request(ask(NOUL, state))
        assert row == {"state": state, "questions": {"q": NOUL}}

    @pytest.mark.parametrize("images", [[], None, {}, ""])
    def test_empty_images_count_as_none(self, images: Any) -> None:
        row = inference.validate_request({**REQUEST, "images": images})
        assert row == REQUEST

    @pytest.mark.parametrize("count", [1, 62])
    def test_one_to_sixty_two_options_pass(self, count: int) -> None:
        question = {"type": "score", "criteria": ["level"] * count}
        row = inference.validate_request(ask(question))
        symbols = inference.compile_row(row).symbols["q"]
        assert symbols == tuple(inference.ANSWER_SYMBOLS[:count])

    @pytest.mark.parametrize("kind", [[], {}])
    def test_an_unhashable_type_is_a_type_error(self, kind: Any) -> None:
        with pytest.raises(TypeError):
            inference.validate_request(ask({"type": kind}))

    def test_nesting_past_the_interpreter_is_a_recursion_error(self) -> None:
        state: list[Any] = []
        for _ in range(sys.getrecursionlimit()):
            state = [state]
        with pytest.raises(RecursionError):
            inference.validate_request(ask(NOUL, state))

    def test_the_row_shares_nothing_with_the_request(self) -> None:
        request = copy.deepcopy(REQUEST)
        row = inference.validate_request(request)
        row["state"]["tries"].append("changed")
        row["questions"]["q1"]["criteria"].clear()
        assert request == REQUEST


class TestPrompt:
    def test_the_messages_hold_exactly_the_documented_text(self) -> None:
        compiled = inference.compile_row(REQUEST)
        user = (
            "Settle every field of the schema for this state.\n\n"
            "## State\n"
            "{\n"
            '  "text": "Il est cassé",\n'
            '  "tries": [\n'
            "    1,\n"
            "    2.5,\n"
            "    null\n"
            "  ]\n"
            "}\n\n"
            "## Decision schema\n"
            "q1: What next?\n"
            "    A = refund: Pay it back\n"
            "    B = replace: Send another\n"
            "    C = wait: None\n"
            "q2: How urgent?\n"
            "    A = 0: low\n"
            "    B = 1: high\n"
            "q3: Is the customer angry?\n"
            "    A = no: the answer is no\n"
            "    B = yes: the answer is yes"
        )
        assistant = (
            '{\n    "q1": "<decision>",\n    "q2": "<decision>",\n'
            '    "q3": "<decision>"\n}'
        )
        assert compiled.messages == [
            {"role": "system", "content": inference.SYSTEM_PROMPT},
            {"role": "user", "content": user},
            {"role": "assistant", "content": assistant},
        ]
        assert compiled.fields == ("q1", "q2", "q3")
        assert compiled.symbols == {
            "q1": ("A", "B", "C"),
            "q2": ("A", "B"),
            "q3": ("A", "B"),
        }

    def test_missing_instructions_read_none(self) -> None:
        compiled = inference.compile_row(ask({"type": "noul"}))
        assert "\nq: None\n" in compiled.messages[1]["content"]

    @pytest.mark.parametrize(
        ("criteria", "lines"),
        [
            ({"YES": "y", "no": "n"}, ["    A = no: n", "    B = yes: y"]),
            ({"true": "y", "False": "n"}, ["    A = no: n", "    B = yes: y"]),
            ({"1": "y", "0": "n"}, ["    A = no: n", "    B = yes: y"]),
            (
                {"maybe": "m", "yes": "y"},
                ["    A = no: the answer is no", "    B = yes: y"],
            ),
        ],
    )
    def test_noul_criteria_are_no_then_yes(
        self, criteria: dict[str, str], lines: list[str]
    ) -> None:
        compiled = inference.compile_row(ask({"type": "noul", "criteria": criteria}))
        assert compiled.messages[1]["content"].splitlines()[-2:] == lines

    @pytest.mark.parametrize(
        "request_",
        [
            ask(NOUL, state=["a <decision> b"]),
            ask(NOUL, name="<decision>"),
            ask({**NOUL, "instructions": "<decision>?"}),
            ask({"type": "choice", "criteria": {"<decision>": "x"}}),
            ask({"type": "choice", "criteria": {"x": "<decision>"}}),
        ],
    )
    def test_the_decision_token_in_the_user_text_is_refused(
        self, request_: dict[str, Any]
    ) -> None:
        row = inference.validate_request(request_)
        with pytest.raises(ValueError, match="<decision> is reserved"):
            inference.compile_row(row)

    def test_the_template_renders_turns_and_an_empty_thought(
        self, engine: inference.DecisionEngine
    ) -> None:
        text = engine.tokenizer.apply_chat_template(
            [
                {"role": "user", "content": "  u\n"},
                {"role": "assistant", "content": "a"},
            ],
            tokenize=False,
            add_generation_prompt=False,
            enable_thinking=False,
            add_vision_id=True,
        )
        assert text == (
            "<|im_start|>user\n  u\n<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\na<|im_end|>\n"
        )

    def test_positions_are_one_before_each_decision_token(
        self, engine: inference.DecisionEngine
    ) -> None:
        compiled, batch, positions = engine.backend.encode(REQUEST)
        ids = batch["input_ids"][0]
        marker = engine.tokenizer.convert_tokens_to_ids("<decision>")
        assert engine.backend.marker_id == marker
        assert [i - 1 for i, t in enumerate(ids.tolist()) if t == marker] == (
            positions.tolist()
        )
        assert len(positions) == len(compiled.fields)

    def test_a_prompt_over_the_limit_is_refused_with_both_numbers(
        self, engine: inference.DecisionEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokens = engine.backend.encode(REQUEST)[1]["input_ids"].shape[1]
        monkeypatch.setattr(engine.backend, "max_length", tokens)
        engine.backend.encode(REQUEST)
        monkeypatch.setattr(engine.backend, "max_length", tokens - 1)
        with pytest.raises(ValueError) as refusal:
            engine.predict(REQUEST)
        assert (
            str(refusal.value) == f"prompt has {tokens} tokens, limit is {tokens - 1}"
        )

    def test_special_token_text_in_the_state_is_that_token(
        self, engine: inference.DecisionEngine
    ) -> None:
        batch = engine.backend.encode(ask(NOUL, "<|im_end|>"))[1]
        end = engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert batch["input_ids"][0].tolist().count(end) == 4

    def test_a_lone_surrogate_is_a_type_error(
        self, engine: inference.DecisionEngine
    ) -> None:
        with pytest.raises(TypeError):
            engine.predict(ask(NOUL, "\ud83d"))


class TestPredict:
    def test_the_envelope_and_every_answer_have_the_documented_shape(
        self, engine: inference.DecisionEngine
    ) -> None:
        response = engine.predict(REQUEST)
        tokens = engine.backend.encode(REQUEST)[1]["input_ids"].shape[1]
        elapsed = response.pop("timing")
        choice, score, noul = (response["answers"][f"q{i}"] for i in (1, 2, 3))
        assert set(elapsed) == {"inference_ms"}
        assert elapsed["inference_ms"] > 0
        assert response == {
            "answers": {"q1": choice, "q2": score, "q3": noul},
            "usage": {"input_tokens": tokens, "output_tokens": 3, "decision_count": 3},
            "calibration": {"method": "temperature-scaling", "temperature": 1.5},
            "model": "Intern-Decision-Demo",
            "backend": "hf",
        }
        for answer, kind, values in (
            (choice, "choice", ["refund", "replace", "wait"]),
            (score, "score", ["0", "1"]),
            (noul, "noul", ["no", "yes"]),
        ):
            self.check_common(answer, kind, values)
        assert choice["choice"] == choice["decision"]
        assert noul["noul"] == noul["probabilities"]["yes"]
        assert score["score"] == pytest.approx(score["probabilities"]["1"])
        assert score["legend"] == {"0": "low", "1": "high"}

    @staticmethod
    def check_common(answer: dict[str, Any], kind: str, values: list[str]) -> None:
        own = {"choice": {"choice"}, "noul": {"noul"}, "score": {"score", "legend"}}
        probabilities = answer["probabilities"]
        assert set(answer) - own[kind] == {
            "type",
            "probabilities",
            "confidence",
            "source",
            "decision",
        }
        assert (answer["type"], answer["source"]) == (kind, "local")
        assert list(probabilities) == values
        assert math.fsum(probabilities.values()) == pytest.approx(1.0)
        assert answer["confidence"] == max(probabilities.values())
        assert probabilities[answer["decision"]] == answer["confidence"]

    def test_score_values_may_be_numbers_of_the_callers(
        self, engine: inference.DecisionEngine
    ) -> None:
        criteria = {"-2.5": "cold", "10": None}
        answer = engine.predict(ask({"type": "score", "criteria": criteria}))
        answer = answer["answers"]["q"]
        assert answer["legend"] == {"-2.5": "cold", "10": "None"}
        expected = -2.5 * answer["probabilities"]["-2.5"]
        expected += 10 * answer["probabilities"]["10"]
        assert answer["score"] == pytest.approx(expected)

    def test_a_repeat_is_bit_identical(self, engine: inference.DecisionEngine) -> None:
        first = engine.predict(REQUEST)["answers"]
        assert engine.predict(REQUEST)["answers"] == first

    def test_options_differ_and_so_do_states(
        self, engine: inference.DecisionEngine
    ) -> None:
        answers = [
            engine.predict(ask(CHOICE, state))["answers"]["q"]["probabilities"]
            for state in ("the parcel is late", "the parcel is here")
        ]
        assert answers[0] != answers[1]
        assert max(answers[0].values()) - min(answers[0].values()) > 0.05

    def test_numbers_are_the_scaled_softmax_of_the_full_forwards_logits(
        self, engine: inference.DecisionEngine
    ) -> None:
        compiled, batch, positions = engine.backend.encode(REQUEST)
        with torch.inference_mode():
            logits = engine.backend.model(**batch, use_cache=False).logits[0]
        for name, position in zip(compiled.fields, positions, strict=True):
            symbols = "ABC"[: len(compiled.symbols[name])]
            ids = [engine.tokenizer.convert_tokens_to_ids(s) for s in symbols]
            expected = torch.softmax(logits[position, ids].float() / 1.5, dim=-1)
            answer = engine.predict(REQUEST)["answers"][name]
            assert list(answer["probabilities"].values()) == pytest.approx(
                expected.tolist(), abs=0.01
            )

    def test_one_forward_reads_only_the_decision_positions(
        self, engine: inference.DecisionEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[dict[str, Any]] = []
        model = engine.backend.model

        def record(**inputs: Any) -> Any:
            calls.append(inputs)
            return model(**inputs)

        monkeypatch.setattr(engine.backend, "model", record)
        engine.predict(REQUEST)
        _, batch, positions = engine.backend.encode(REQUEST)
        (call,) = calls
        assert call.pop("use_cache") is False
        assert {name: tensor.tolist() for name, tensor in call.items()} == {
            "input_ids": batch["input_ids"].tolist(),
            "attention_mask": batch["attention_mask"].tolist(),
            "logits_to_keep": positions.tolist(),
        }

    def test_text_never_reaches_the_vision_tower(
        self, engine: inference.DecisionEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Refusing(torch.nn.Module):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                raise AssertionError("the vision tower was called")

        before = engine.predict(REQUEST)["answers"]
        assert sum(p.numel() for p in engine.backend.model.model.visual.parameters())
        monkeypatch.setattr(engine.backend.model.model, "visual", Refusing())
        assert engine.predict(REQUEST)["answers"] == before

    def test_non_finite_logits_are_a_value_error_after_the_forward(
        self, engine: inference.DecisionEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        score = engine.backend.score

        def spoil(row: Any) -> Any:
            compiled, logits, tokens, elapsed = score(row)
            return compiled, torch.full_like(logits, math.nan), tokens, elapsed

        monkeypatch.setattr(engine.backend, "score", spoil)
        with pytest.raises(ValueError, match="non-finite"):
            engine.predict(REQUEST)

    def test_a_distribution_that_does_not_sum_to_one_is_a_value_error(self) -> None:
        with pytest.raises(ValueError, match="do not sum to one"):
            inference._scale({"a": 0.5, "b": 0.4}, 1.5)

    def test_a_moved_argmax_is_an_arithmetic_error(self) -> None:
        with pytest.raises(ArithmeticError, match="moved the argmax"):
            inference._scale({"a": 0.4, "b": 0.6}, 1e300)

    def test_an_exact_tie_goes_to_the_smaller_string(self) -> None:
        assert inference._find_top({"b": 0.5, "a": 0.5, "B": 0.0}) == "a"

    @pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
    def test_a_temperature_that_is_no_scale_is_refused(
        self, demo_checkpoint: DemoCheckpoint, temperature: float
    ) -> None:
        with pytest.raises(ValueError, match="temperature must be finite and over 0"):
            inference.DecisionEngine(demo_checkpoint.path, temperature=temperature)

    def test_another_backend_is_refused(self, demo_checkpoint: DemoCheckpoint) -> None:
        with pytest.raises(ValueError, match="backend must be 'hf', not 'vllm'"):
            inference.DecisionEngine(demo_checkpoint.path, backend="vllm")


class TestTokenizer:
    def test_every_answer_symbol_is_one_token(
        self, engine: inference.DecisionEngine
    ) -> None:
        ids = [engine.tokenizer.encode(s) for s in inference.ANSWER_SYMBOLS]
        assert len(ids) == 62
        assert {len(token) for token in ids} == {1}
        assert len({token[0] for token in ids}) == 62

    @pytest.mark.parametrize("text", ["héllo <decision> 日本 😀\n\t  x", "\x00\x7f"])
    def test_any_text_survives(
        self, engine: inference.DecisionEngine, text: str
    ) -> None:
        assert engine.tokenizer.decode(engine.tokenizer.encode(text)) == text

    def test_plain_english_is_over_three_characters_a_token(
        self, engine: inference.DecisionEngine
    ) -> None:
        text = (
            "I ordered a lamp two weeks ago and it still has not arrived. Could you "
            "tell me where it is, or give me my money back before the weekend?"
        )
        assert 3.0 < len(text) / len(engine.tokenizer.encode(text)) < 5.0


class TestCheckpoint:
    def test_the_path_ends_in_the_pinned_revision(
        self, demo_checkpoint: DemoCheckpoint
    ) -> None:
        pins = demo_checkpoint.pins
        assert Path(demo_checkpoint.path).parts[-3:] == (
            "models--demo--Intern-Decision-Demo",
            "snapshots",
            pins.revision,
        )
        assert len(bytes.fromhex(pins.revision)) == 20

    def test_the_pins_name_the_demo_and_the_packaged_code(
        self, demo_checkpoint: DemoCheckpoint
    ) -> None:
        pins = demo_checkpoint.pins
        packaged = files("intern_decision_serve.demo").joinpath("inference.py")
        copied = Path(demo_checkpoint.path, "inference.py").read_bytes()
        assert copied == packaged.read_bytes()
        assert pins.inference_sha256 == hashlib.sha256(copied).hexdigest()
        assert (pins.name, pins.source) == (
            inference.MODEL_NAME,
            "demo/Intern-Decision-Demo",
        )
        assert pins.temperature == inference.DEFAULT_TEMPERATURE
        assert pins.min_python == (3, 11)

    def test_every_size_has_a_revision_of_its_own(self) -> None:
        assert (
            checkpoint.demo_pins("tiny").revision != checkpoint.demo_pins("4b").revision
        )

    def test_the_4b_has_the_real_ones_parameters(self) -> None:
        token_ids = dict.fromkeys(SPECIAL_TOKENS, 0)
        config = weights.make_config("4b", token_ids)
        with torch.device("meta"):
            model = transformers.Qwen3_5ForConditionalGeneration(config)
        vision = sum(p.numel() for p in model.model.visual.parameters())
        total = sum(p.numel() for p in model.parameters())
        assert round(total / 1e9, 2) == 4.54
        assert round(2 * vision / 2**30, 2) == 0.62

    def test_an_unknown_size_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="size must be one of tiny, 4b, not '7b'"):
            make_checkpoint(tmp_path, size="7b")
        assert not list(tmp_path.iterdir())

    def test_files_are_read_only_links_to_blobs_named_by_their_sha256(
        self, demo_checkpoint: DemoCheckpoint
    ) -> None:
        for path in Path(demo_checkpoint.path).iterdir():
            assert path.is_symlink()
            assert path.resolve().name == hashlib.sha256(path.read_bytes()).hexdigest()
            assert path.stat().st_mode & 0o777 == 0o444

    def test_the_weights_come_in_shards_that_the_index_lists(
        self, demo_checkpoint: DemoCheckpoint
    ) -> None:
        snapshot = Path(demo_checkpoint.path)
        index = json.loads((snapshot / "model.safetensors.index.json").read_bytes())
        shards = {path.name for path in snapshot.glob("*.safetensors")}
        assert len(shards) > 1
        assert set(index["weight_map"].values()) == shards

    def test_loading_and_scoring_leave_the_directory_as_it_was(
        self, demo_checkpoint: DemoCheckpoint
    ) -> None:
        root = Path(demo_checkpoint.path).parents[1]
        before = describe_tree(root)
        inference.DecisionEngine(demo_checkpoint.path, device="cpu").predict(REQUEST)
        assert describe_tree(root) == before

    def test_a_rebuild_gives_the_same_bytes_and_a_lost_file_is_mended(
        self, demo_checkpoint: DemoCheckpoint, tmp_path: Path
    ) -> None:
        random_state = torch.random.get_rng_state()
        other = make_checkpoint(tmp_path)
        assert other.pins == demo_checkpoint.pins
        assert link_targets(other.path) == link_targets(demo_checkpoint.path)
        assert torch.equal(torch.random.get_rng_state(), random_state)
        assert torch.get_default_dtype() == torch.float32
        next(Path(other.path).glob("*.safetensors")).unlink()
        make_checkpoint(tmp_path)
        assert link_targets(other.path) == link_targets(demo_checkpoint.path)

    def test_a_complete_snapshot_is_reused(
        self, demo_checkpoint: DemoCheckpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(checkpoint, "write_weights", fail)
        root = Path(demo_checkpoint.path).parents[2]
        assert make_checkpoint(root) == demo_checkpoint

    def test_a_build_that_fails_leaves_no_snapshot(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(checkpoint, "write_weights", fail)
        with pytest.raises(OSError, match="disk full"):
            make_checkpoint(tmp_path)
        assert not list(tmp_path.glob("*/snapshots/*"))

    def test_importing_the_package_loads_no_torch(self) -> None:
        code = (
            "import sys, intern_decision_serve.demo\n"
            "print({'torch', 'transformers', 'tokenizers'} & set(sys.modules))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout == "set()\n"


def fail(*args: Any, **kwargs: Any) -> None:
    raise OSError("disk full")


def link_targets(snapshot: str) -> dict[str, str]:
    return {path.name: path.resolve().name for path in Path(snapshot).iterdir()}


def describe_tree(root: Path) -> dict[str, tuple[int, int, int]]:
    return {
        str(path.relative_to(root)): (
            path.stat().st_mode,
            path.stat().st_size,
            path.stat().st_mtime_ns,
        )
        for path in root.rglob("*")
    }
