"""A killed run resumes only with its old inputs: each is changed in turn, and the refusal names it."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import loopq
from loopq.calibrate.inputs import OUTPUT, changed_inputs, model_inputs
from loopq.storage import journal
from loopq.storage.folders import INPUTS
from tests.support.kills import Kill
from tests.support.looped import save_dense
from tests.support.marks import slow_unless
from tests.support.python_models import MODULE
from tests.support.runs import digest

QUICK = ("--n-prompts", 2, "--seq-len", 16, "--group-size", 16, "--threads", 1)


def _in_json(name, **values):
    def change(folder, monkeypatch):
        path = folder / "model" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def _in_text(name, old, new):
    def change(folder, monkeypatch):
        path = folder / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        sys.modules.pop("helper_of_mine", None)

    return change


def _library(name):
    def change(folder, monkeypatch):
        versions = journal.versions()
        monkeypatch.setattr(journal, "versions", lambda: versions | {name: "999"})
        monkeypatch.setattr("loopq.calibrate.inputs.versions", journal.versions)

    return change


def _processor(folder, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")


LOOPED, OWN = ("looped:{}/model[1:3]x2",), ("--python", "{}/own.py:make", "--depth", "n_steps")
CASES = {
    "activation": (LOOPED, _in_json("config.json", hidden_act="gelu"), "config.json"),
    "norm": (LOOPED, _in_json("config.json", rms_norm_eps=0.1), "config.json"),
    "rope": (
        LOOPED,
        _in_json("config.json", rope_theta=2.0, rope_parameters={"rope_type": "default", "rope_theta": 2.0}),
        "config.json",
    ),
    "side file": (LOOPED, _in_json("generation_config.json", top_k=3), "generation_config.json"),
    "loopq": (LOOPED, _library("loopq"), "the version of loopq"),
    "torch": (LOOPED, _library("torch"), "the version of torch"),
    "transformers": (LOOPED, _library("transformers"), "the version of transformers"),
    "register": (LOOPED, _in_text("registered.py", "1", "2"), "the code registered.py"),
    "helper": (LOOPED, _in_text("helper_of_mine.py", "1", "2"), "the code helper_of_mine.py"),
    "python": (OWN, _in_text("own.py", "torch.tanh", "torch.sin"), "the code own.py"),
    "file": (OWN, _in_text("alpha.txt", "1.0", "0.5"), OUTPUT),
    "processor": (LOOPED, _processor, "the processor"),
    "text": (LOOPED, _in_text("text.jsonl", "[5", "[6"), "the calibration"),
}


@pytest.fixture
def room(tmp_path):
    model = LlamaForCausalLM.from_pretrained(save_dense(tmp_path / "model"))
    for parameter in model.parameters():
        # Larger, so that activations and norms matter.
        parameter.data.mul_(1.0 if parameter.ndim == 1 else 10.0)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "alpha.txt").write_text("1.0")
    scaled = f"float(Path({str(tmp_path / 'alpha.txt')!r}).read_text()) * self.core("
    own = "from pathlib import Path\n" + MODULE.replace("self.core(x", scaled + "x")
    (tmp_path / "own.py").write_text(own)
    (tmp_path / "registered.py").write_text("import helper_of_mine\nX = 1\n")
    (tmp_path / "helper_of_mine.py").write_text("X = 1\n")
    lines = [json.dumps({"input_ids": [n + 3 * k for k in range(16)]}) for n in (5, 70)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    return tmp_path


#: One of each way to a digest: a file of the model, a version, code, the text.
QUICK_CASES = ("activation", "loopq", "helper", "python", "file", "text")


@pytest.mark.parametrize("case", slow_unless(QUICK_CASES.__contains__, CASES))
def test_a_run_starts_again_after_a_changed_input(room, command, monkeypatch, case):
    model, change, name = CASES[case]
    register = ("--register", room / "registered.py") if case in ("register", "helper") else ()
    monkeypatch.setattr(sys, "path", [*sys.path])
    text = ("--calibration", room / "text.jsonl")

    def quantize(out):
        words = [word.format(room) for word in model]
        return command(*register, "quantize", *words, "--out", room / out, *text, *QUICK)

    save, seen = journal.Journal.save, []

    def killed(self, name, *args, **kwargs):
        save(self, name, *args, **kwargs)
        seen.extend([name] * ("layers" in str(self.folder)))
        # Layers that were solved for the old inputs would be taken again.
        if len(seen) == (4 if model is LOOPED else 1):
            raise Kill

    with monkeypatch.context() as patch:
        patch.setattr(journal.Snapshots, "due", lambda self: True)
        patch.setattr(journal.Journal, "save", killed)
        with pytest.raises(Kill):
            quantize("a")
    change(room, monkeypatch)
    code, _, err = quantize("a")
    assert code == 0, err
    said = [line for line in err.splitlines() if "changed since the interruption; starts again" in line]
    assert len(said) == 1, err
    assert said[0].startswith(f"{name} changed"), said
    assert quantize("b")[0] == 0
    assert digest(room / "a") == digest(room / "b")


class Looped(nn.Module):
    """Scaled by an attribute and by a buffer that is not saved."""

    def __init__(self, alpha=1.0, beta=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.alpha, self.embed = alpha, nn.Embedding(64, 16)
        self.core, self.head = nn.Linear(16, 16), nn.Linear(16, 64)
        self.register_buffer("beta", torch.tensor(beta), persistent=False)

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(3):
            x = self.alpha * x + self.beta * torch.tanh(self.core(x))
        return self.head(x)


def _hooked():
    model = Looped()
    model.core.register_forward_hook(lambda module, inputs, output: output / 2)
    return model


@pytest.mark.parametrize(
    "make",
    [lambda: Looped(alpha=0.5), lambda: Looped(beta=0.5), _hooked],
    ids=("attribute", "buffer", "hook"),
)
def test_a_killed_run_does_not_go_on_with_another_module(tmp_path, monkeypatch, capsys, make):
    ids = torch.arange(48).reshape(3, 16)

    def quantize(model, out):
        loopq.quantize(model, ids, out=tmp_path / out, bits=3, group_size=16, threads=1)

    save, seen = journal.Journal.save, []

    def killed(self, name, *args, **kwargs):
        save(self, name, *args, **kwargs)
        seen.append(name)
        if len(seen) == 2:
            raise Kill

    with monkeypatch.context() as patch:
        patch.setattr(journal.Snapshots, "due", lambda self: True)
        patch.setattr(journal.Journal, "save", killed)
        with pytest.raises(Kill):
            quantize(Looped(), "a")
    quantize(make(), "a")
    quantize(make(), "b")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_an_unchanged_run_goes_on_without_a_word(room, command, monkeypatch):
    assert changed_inputs(room, {"a": "1", "b": "2"}) == []
    assert changed_inputs(room, {"b": "2", "a": "1"}) == []
    assert changed_inputs(room, {"a": "1", "c": "2"}) == ["b", "c"]
    (room / INPUTS).write_text("{")
    assert changed_inputs(room, {"a": "1"}) == []


def test_the_code_and_the_modules_of_a_model_count(loaded):
    digests = model_inputs(loaded.system, loaded.side_files)
    assert digests == model_inputs(loaded.system, loaded.side_files)
    assert {"the code loopq", "the code torch", "the model's modules"} <= digests.keys()


def test_what_changed_with_another_input_is_not_named(tmp_path):
    before = {"the version of torch": "1", "the code torch": "1", "the weights": "1", OUTPUT: "1"}
    changed_inputs(tmp_path, before)
    assert changed_inputs(tmp_path, before | {OUTPUT: "2"}) == [OUTPUT]
    assert changed_inputs(tmp_path, before | {"the weights": "2", OUTPUT: "3"}) == ["the weights"]
    changed_inputs(tmp_path, before)
    assert changed_inputs(tmp_path, dict.fromkeys(before, "2")) == ["the version of torch", "the weights"]
