"""The inference code of a fake checkpoint, for the fake torch: the pinned surface only.

The harness writes these bytes into a snapshot and the loader executes them. `CONTROL`
is where a test plants a fault: a hook at each stage of predict().
"""

import copy
import hashlib
import json
from dataclasses import dataclass

import torch

MODEL_NAME = "Fake-Decision"
DECISION_TOKEN = "<decision>"


class Control:
    """What the test wants to happen; every hook takes the call's text or tokens."""

    def __init__(self):
        self.calls = 0
        self.constructed = []
        self.before_forward = lambda text: None
        self.in_forward = lambda text: None
        self.after_forward = lambda text: None
        self.weight_device = None
        self.extra_tokens = 0
        self.visual_matters = False
        self.drift = []


CONTROL = Control()


@dataclass
class Compiled:
    messages: list
    fields: tuple


def validate_request(request):
    if "state" not in request:
        raise ValueError("no state")
    return copy.deepcopy({"state": request["state"], "questions": request["questions"]})


def compile_row(row):
    text = json.dumps(row["state"], indent=2, ensure_ascii=False)
    text += json.dumps(row["questions"], ensure_ascii=False)
    if DECISION_TOKEN in text:
        raise ValueError("<decision> is reserved")
    return Compiled([{"role": "user", "content": text}], tuple(row["questions"]))


class Tokenizer:
    chat_template = "{{ messages }}"

    def apply_chat_template(self, messages, **arguments):
        assert arguments == {
            "tokenize": False,
            "add_generation_prompt": False,
            "enable_thinking": False,
            "add_vision_id": True,
        }
        return "".join(message["content"] for message in messages)

    def __call__(self, text, *, add_special_tokens):
        assert add_special_tokens is False
        return {"input_ids": text.split()}

    def get_vocab(self):
        return {"a": 0, "evidence": 1, "<decision>": 2}


class Visual(torch.nn.Module):
    def __init__(self, device):
        self.weight = torch.allocate(64, device)

    def forward(self, *images):
        return 1


class Inner:
    def __init__(self, device):
        self.visual = Visual(device)


class Model:
    def __init__(self, device):
        self.weight = torch.allocate(1024, CONTROL.weight_device or device)
        self.model = Inner(device)
        self.device = torch.device(device)

    def parameters(self):
        return iter([self.weight])

    def named_parameters(self):
        return iter([("weight", self.weight)])

    def named_buffers(self):
        return iter([])

    def __call__(self, *, input_ids, **_):
        activations = torch.allocate(len(input_ids.values), self.device)
        CONTROL.in_forward(" ".join(input_ids.values))
        seed = " ".join(input_ids.values)
        if CONTROL.visual_matters and type(self.model.visual) is not Visual:
            seed += " without a tower"
        seed += str(CONTROL.drift.pop(0)) if CONTROL.drift else ""
        digest = hashlib.sha256(seed.encode()).digest()
        del activations
        return digest[0] / 256


class HFBackend:
    def __init__(self, max_length, device):
        self.tokenizer = Tokenizer()
        self.processor = self.tokenizer
        self.device = torch.device(device)
        self.max_length = max_length
        self.model = Model(device)

    def encode(self, row):
        compiled = compile_row(row)
        text = self.tokenizer.apply_chat_template(
            compiled.messages,
            tokenize=False,
            add_generation_prompt=False,
            enable_thinking=False,
            add_vision_id=True,
        )
        ids = text.split()
        if len(ids) > self.max_length:
            raise ValueError(f"prompt of {len(ids)} tokens, limit {self.max_length}")
        batch = {"input_ids": torch.allocate(1, self.device, ids)}
        return compiled, batch, [0] * len(compiled.fields)

    def score(self, row):
        compiled, batch, positions = self.encode(row)
        share = self.model(**batch, use_cache=False, logits_to_keep=positions)
        return compiled, share, len(batch["input_ids"].values) + CONTROL.extra_tokens


class DecisionEngine:
    def __init__(self, checkpoint, *, max_length, device):
        CONTROL.constructed.append((checkpoint, max_length, device))
        torch.cuda.events.append("construct")
        self.backend = HFBackend(max_length, device)
        self.tokenizer = self.backend.tokenizer

    def predict(self, request):
        CONTROL.calls += 1
        row = validate_request(request)
        CONTROL.before_forward(json.dumps(row))
        compiled, share, tokens = self.backend.score(row)
        CONTROL.after_forward(json.dumps(row))
        answers = {
            name: {"choice": "alarm", "probabilities": {"alarm": share}}
            for name in compiled.fields
        }
        return {
            "answers": answers,
            "usage": {"input_tokens": tokens},
            "timing": {"inference_ms": CONTROL.calls},
        }
