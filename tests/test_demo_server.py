"""The main job end to end: the demo process, real torch, real HTTP, real signals."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from demo_server import TOKEN, DemoServer, exchange, run_command, start_demo

from intern_decision_serve import __version__
from intern_decision_serve.demo import DemoCheckpoint
from intern_decision_serve.pins import DEFAULT_MODEL, FAMILY

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from intern_decision_serve.demo import inference  # noqa: E402

pytestmark = pytest.mark.torch

STATE = {"command": "rm -rf build", "cwd": "/home/maßstab", "tries": [1, 2.5, None]}
OPTIONS = [
    {"id": "allow", "description": "harmless and reversible"},
    {"id": "ask", "description": "needs a person"},
    {"id": "deny", "description": "destroys data"},
]
DECISION = {"id": "gate", "question": "What happens?", "options": OPTIONS}
QUESTIONS = {
    "route": {
        "type": "choice",
        "instructions": "Who takes it?",
        "criteria": {"ops": "the operators", "dev": None, "nobody": "drop it"},
    },
    "risk": {
        "type": "score",
        "instructions": "Risk?",
        "criteria": ["low", "mid", "hi"],
    },
    "safe": {"type": "noul", "instructions": "Is this reversible?"},
}
RESULT_FIELDS = [
    "id",
    "option_ids",
    "probabilities",
    "top",
    "confidence",
    "calibration",
    "native",
    "input_tokens",
    "prompt_sha256",
    "prompt_version",
    "model",
    "readout",
    "probability_status",
    "call",
]


@pytest.fixture(scope="module")
def direct(demo_checkpoint: DemoCheckpoint) -> Iterator[inference.DecisionEngine]:
    """The checkpoint's own engine in this process, on one thread as the server is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield inference.DecisionEngine(demo_checkpoint.path, device="cpu")
    torch.set_num_threads(threads)


def choice(decision: dict[str, Any]) -> dict[str, Any]:
    """The question that the contract's mapping makes of a decision."""
    criteria = {option["id"]: option["description"] for option in decision["options"]}
    return {
        "type": "choice",
        "instructions": decision["question"],
        "criteria": criteria,
    }


def hash_rendered(
    engine: inference.DecisionEngine, request: dict[str, Any]
) -> tuple[str, int]:
    """The sha256 of a request's rendered text, and its tokens."""
    compiled = inference.compile_row(inference.validate_request(request))
    text = engine.tokenizer.apply_chat_template(
        compiled.messages,
        tokenize=False,
        add_generation_prompt=False,
        enable_thinking=False,
        add_vision_id=True,
    )
    tokens = len(engine.tokenizer(text, add_special_tokens=False)["input_ids"])
    return hashlib.sha256(text.encode()).hexdigest(), tokens


class TestDecide:
    def test_a_plain_decision_is_predicts_answer_to_one_question_q(
        self, demo_server: DemoServer, direct: inference.DecisionEngine
    ) -> None:
        status, result = demo_server.ask("/decide", {"state": STATE, **DECISION})
        request = {"state": STATE, "questions": {"q": choice(DECISION)}}
        native = direct.predict(request)["answers"]["q"]
        assert status == 200
        assert list(result) == [*RESULT_FIELDS, "total_seconds", "forward_seconds"]
        assert result["native"] == native
        assert result["option_ids"] == ["allow", "ask", "deny"]
        assert result["probabilities"] == list(native["probabilities"].values())
        assert result["top"] == native["choice"]
        assert result["call"] == {"index": 0, "field": "q", "questions": 1}
        assert (result["prompt_sha256"], result["input_tokens"]) == hash_rendered(
            direct, request
        )

    def test_all_orderings_of_three_options_are_six_calls_averaged(
        self, demo_server: DemoServer, direct: inference.DecisionEngine
    ) -> None:
        body = {"state": STATE, **DECISION, "orderings": "all"}
        status, result = demo_server.ask("/decide", body)
        assert status == 200
        combined, orderings = result["combined"], result["orderings"]
        assert combined["orderings"] == len(orderings) == 6
        assert [one["id"] for one in orderings] == [f"gate#o{k}" for k in range(6)]
        assert [one["call"]["index"] for one in orderings] == list(range(6))
        orders = [list(order) for order in itertools.permutations(OPTIONS)]
        for one, order in zip(orderings, orders, strict=True):
            request = {
                "state": STATE,
                "questions": {"q": choice({**DECISION, "options": order})},
            }
            assert one["native"] == direct.predict(request)["answers"]["q"]
        assert sum(combined["probabilities"]) == pytest.approx(1.0)


class TestDecideShared:
    def test_forty_decisions_are_calls_of_16_16_and_8_in_request_order(
        self, demo_server: DemoServer
    ) -> None:
        decisions = [{**DECISION, "id": f"d{i}"} for i in range(40)]
        body = {"state": STATE, "decisions": decisions}
        status, answer = demo_server.ask("/decide/shared", body)
        assert status == 200
        assert answer["timing"]["calls"] == 3
        assert answer["timing"]["questions_per_call"] == [16, 16, 8]
        assert answer["timing"]["batch_size"] == 40
        assert [result["id"] for result in answer["results"]] == [
            f"d{i}" for i in range(40)
        ]
        assert [result["call"] for result in answer["results"]] == [
            {
                "index": i // 16,
                "field": f"q{i % 16 + 1}",
                "questions": 16 if i < 32 else 8,
            }
            for i in range(40)
        ]

    def test_prompt_sha256_of_a_multi_question_call_is_the_rendered_texts(
        self, demo_server: DemoServer, direct: inference.DecisionEngine
    ) -> None:
        decisions = [{**DECISION, "id": f"d{i}"} for i in range(3)]
        body = {"state": STATE, "decisions": decisions}
        _, answer = demo_server.ask("/decide/shared", body)
        fields = {f"q{i}": choice(DECISION) for i in (1, 2, 3)}
        request = {"state": STATE, "questions": fields}
        sha256, tokens = hash_rendered(direct, request)
        natives = direct.predict(request)["answers"]
        assert {result["prompt_sha256"] for result in answer["results"]} == {sha256}
        assert {result["input_tokens"] for result in answer["results"]} == {tokens}
        assert [result["native"] for result in answer["results"]] == list(
            natives.values()
        )


class TestSystemOne:
    def test_answers_equal_a_direct_predict_bit_for_bit(
        self, demo_server: DemoServer, direct: inference.DecisionEngine
    ) -> None:
        request = {"state": STATE, "questions": QUESTIONS}
        status, response = demo_server.ask("/v1/systemone", {**request, "model": "x"})
        expected = direct.predict(request)
        served_as = response.pop("model")
        response.pop("timing"), expected.pop("timing"), expected.pop("model")
        assert status == 200
        assert response == json.loads(json.dumps(expected))
        assert served_as.startswith("Intern-Decision-Demo@")

    def test_a_prompt_over_max_tokens_is_the_models_own_refusal(
        self, demo_server: DemoServer
    ) -> None:
        state = " ".join(str(i) for i in range(9000))
        body = {"state": state, "questions": QUESTIONS}
        status, answer = demo_server.ask("/v1/systemone", body)
        assert status == 422
        assert answer["error"]["code"] == "invalid_request"
        assert "8192" in answer["error"]["message"]

    def test_a_prompt_far_over_max_tokens_is_refused_by_its_beginning(
        self, demo_server: DemoServer
    ) -> None:
        body = {"state": "a b " * 30_000, "questions": QUESTIONS}
        assert demo_server.ask("/v1/systemone", body) == (
            422,
            {
                "error": {
                    "code": "invalid_request",
                    "message": "the prompt has over 16384 tokens, limit is 8192",
                }
            },
        )


class TestHealth:
    def test_it_names_the_demo(
        self, demo_server: DemoServer, demo_checkpoint: DemoCheckpoint
    ) -> None:
        status, health = demo_server.ask("/health")
        assert status == 200
        assert health["status"] == "ok"
        assert health["version"] == __version__
        assert health["model"] == {
            "source": "demo/Intern-Decision-Demo",
            "revision": demo_checkpoint.pins.revision,
            "dtype": "bfloat16",
            "device": "cpu",
            "torch_version": torch.__version__,
            "transformers_version": "5.17.0",
            "serving_config": health["model"]["serving_config"],
            "name": "Intern-Decision-Demo",
            "inference_sha256": demo_checkpoint.pins.inference_sha256,
            "chat_template_sha256": health["model"]["chat_template_sha256"],
        }

    def test_every_result_names_the_demo(self, demo_server: DemoServer) -> None:
        _, health = demo_server.ask("/health")
        _, result = demo_server.ask("/decide", {"state": STATE, **DECISION})
        assert result["model"] == health["model"]


def snapshot_of(directory: Path) -> dict[str, tuple[str, int, int]]:
    """Every file below: its bytes' hash, mode and mtime; every folder too."""
    found = {}
    for path in sorted(directory.rglob("*")):
        digest = "" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        status = path.lstat()
        found[str(path)] = (digest, status.st_mode, status.st_mtime_ns)
    return found


def copy_checkpoint(checkpoint: DemoCheckpoint, directory: Path) -> Path:
    """A copy of the demo's directory, links kept; returns its root."""
    root = Path(checkpoint.path).parents[2]
    return Path(shutil.copytree(root, directory, symlinks=True))


class TestStop:
    @pytest.fixture
    def start(
        self, demo_checkpoint: DemoCheckpoint, tmp_path: Path
    ) -> Iterator[Callable[..., DemoServer]]:
        servers: list[DemoServer] = []
        directory = Path(demo_checkpoint.path).parents[2]

        def start(**settings: str) -> DemoServer:
            logs = tmp_path / f"logs{len(servers)}"
            servers.append(start_demo(directory, logs, **settings))
            return servers[-1]

        yield start
        for server in servers:
            server.process.kill()
            server.process.wait()

    def test_sigterm_while_loading_exits_0(
        self, start: Callable[..., DemoServer]
    ) -> None:
        server = start()
        server.wait_for_log("importing torch")
        assert server.stop() == 0
        assert server.out.read_text() == ""

    def test_sigterm_with_idle_keep_alive_clients_exits_0_and_leaves_the_snapshot(
        self, demo_checkpoint: DemoCheckpoint, tmp_path: Path
    ) -> None:
        directory = copy_checkpoint(demo_checkpoint, tmp_path / "demo")
        for path in directory.rglob("*"):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & ~0o222)  # as a read-only mount
        before = snapshot_of(directory)
        server = start_demo(directory, tmp_path / "logs")
        server.wait_until_ready()
        clients = [server.connect() for _ in range(5)]
        for client in clients:
            assert exchange(client, "/decide", {"state": STATE, **DECISION})[0] == 200
        assert server.stop() == 0
        for client in clients:
            client.close()
        assert snapshot_of(directory) == before

    def test_sigterm_during_a_call_answers_it_refuses_new_work_and_exits_0(
        self, start: Callable[..., DemoServer]
    ) -> None:
        server = start()
        server.wait_until_ready()
        keep_alive = server.connect()
        assert exchange(keep_alive, "/health")[0] == 200
        answers = ask_for_long(server)
        server.terminate()
        server.wait_for_log("stopping: ")
        status, refusal = exchange(keep_alive, "/decide", {"state": STATE, **DECISION})
        assert (status, refusal["error"]["code"]) == (503, "shutting_down")
        keep_alive.close()
        assert server.wait() == 0
        assert [status for status, _ in answers()] == [200]

    def test_a_second_sigterm_during_a_call_exits_0_at_once(
        self, start: Callable[..., DemoServer]
    ) -> None:
        server = start()
        server.wait_until_ready()
        answers = ask_for_long(server)
        server.terminate()
        server.wait_for_log("stopping: ")
        server.terminate()
        assert server.wait() == 0
        answers()  # answered or cut off: the operator asked twice


def ask_for_long(server: DemoServer) -> Callable[[], list[tuple[int, Any]]]:
    """Start a request of many long calls; returns once one of them runs.

    The returned function joins the client and gives what it was answered.
    """
    state = " ".join(f"line {i}" for i in range(1200))
    body = {"state": state, **DECISION, "orderings": "all"}
    answers: list[tuple[int, Any]] = []

    def ask() -> None:
        try:
            answers.append(server.ask("/decide", body))
        except (OSError, ValueError):
            pass

    client = threading.Thread(target=ask)
    client.start()
    while not server.ask("/health")[1]["queue"]["scoring"]:
        assert client.is_alive()

    def join() -> list[tuple[int, Any]]:
        client.join()
        return answers

    return join


class TestRefusedStart:
    @pytest.mark.parametrize(
        ("name", "value", "rule"),
        [
            ("MAX_QUEUE", "0", "must be"),
            ("MAX_TOKENS", "8k", "must be"),
            ("DEVICE", "gpu", "must be"),
            ("VRAM_CAP_GIB", "inf", "must be"),
            ("KEEP_VISION", "yes", "must be"),
        ],
    )
    def test_a_bad_setting_is_one_line_with_name_value_and_rule(
        self, name: str, value: str, rule: str
    ) -> None:
        ended = run_command("serve", API_TOKEN=TOKEN, **{name: value})
        assert ended.returncode == 78
        assert ended.stdout == ""
        assert ended.stderr.count("\n") == 1
        assert f"INTERN_DECISION_{name}" in ended.stderr
        assert value in ended.stderr
        assert rule in ended.stderr
        assert TOKEN not in ended.stderr

    @pytest.mark.parametrize(
        "token", ["short-secret", "x" * 40 + "é", "two words " * 5]
    )
    def test_a_weak_token_is_refused_and_never_shown(self, token: str) -> None:
        ended = run_command("serve", API_TOKEN=token)
        assert ended.returncode == 78
        assert ended.stderr.count("\n") == 1
        assert "INTERN_DECISION_API_TOKEN" in ended.stderr
        assert token not in ended.stderr

    def test_a_taken_port_is_told_before_anything_loads(
        self, demo_checkpoint: DemoCheckpoint
    ) -> None:
        root = str(Path(demo_checkpoint.path).parents[2])
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            ended = run_command("demo", "--dir", root, "--port", port, API_TOKEN=TOKEN)
        assert ended.returncode == 78
        assert ended.stderr == (
            f"intern-decision-serve: cannot listen on 127.0.0.1:{port}: "
            f"[Errno 98] {os.strerror(98)}\n"
        )

    def test_one_flipped_byte_in_inference_py_is_refused(
        self, demo_checkpoint: DemoCheckpoint, tmp_path: Path
    ) -> None:
        root = copy_checkpoint(demo_checkpoint, tmp_path / "demo")
        file = root / Path(demo_checkpoint.path).relative_to(
            Path(demo_checkpoint.path).parents[2]
        )
        flip_a_byte(file / "inference.py")
        ended = run_command("demo", "--dir", str(root), "--port", "0", API_TOKEN=TOKEN)
        assert ended.returncode == 78
        assert ended.stdout == ""
        last = ended.stderr.splitlines()[-1]
        assert "inference.py" in last
        assert f"pin of {demo_checkpoint.pins.name}" in last

    def test_another_revisions_directory_is_refused(
        self, demo_checkpoint: DemoCheckpoint
    ) -> None:
        ended = run_command(
            "serve",
            API_TOKEN=TOKEN,
            CHECKPOINT=demo_checkpoint.path,
            DEVICE="cpu",
            PORT="0",
        )
        assert ended.returncode == 78
        last = ended.stderr.splitlines()[-1]
        assert f"snapshots/{FAMILY[DEFAULT_MODEL].revision}" in last
        assert demo_checkpoint.path in last


def flip_a_byte(link: Path) -> None:
    """Replace the link by a file that differs in one byte."""
    content = bytearray(link.read_bytes())
    content[len(content) // 2] ^= 1
    link.unlink()
    link.write_bytes(content)
