"""A plain torch module from a file of one's own: every command that opens a model takes it."""

from __future__ import annotations

import pytest

import loopq
from loopq.errors import ConfigError
from loopq.models.from_python import load_python
from loopq.systems.generic import Generic

MODULE = """
import torch
from torch import nn


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        # Both are larger or smaller than the vocabulary, and neither is read by token ids.
        self.positions, self.steps = nn.Embedding(300, 16), nn.Embedding(8, 16)
        self.core, self.head = nn.Linear(16, 16), nn.Linear(16, 256)

    def forward(self, ids, n_steps=4):
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        for t in range(n_steps):
            x = x + torch.tanh(self.core(x + self.steps.weight[t]))
        return self.head(x)


def make():
    torch.manual_seed(0)
    return Loop()
"""
TEXT = ("--n-prompts", 2, "--seq-len", 24)


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "own.py").write_text(MODULE)
    return f"{tmp_path / 'own.py'}:make"


def test_every_command_takes_it(spec, tmp_path, command):
    model = ("--python", spec, "--depth", "n_steps")
    code, _, err = command("quantize", *model, "--out", tmp_path / "q", "--group-size", 16, *TEXT)
    assert code == 0, err
    for depth in (2, 4, 8):
        code, text, err = command("evaluate", *model, tmp_path / "q", "--n-steps", depth, *TEXT)
        assert code == 0, err
        assert f"{depth} steps" in text
    code, text, err = command("check", *model)
    assert code == 0, text
    code, text, err = command("diagnose", *model, "--only", "ranks", *TEXT)
    assert code == 0, err
    assert "core.weight: " in text


def test_from_python_at_half_and_at_twice_the_depth(spec):
    model = load_python(spec).model
    ids = [[1, 2, 3, 4], [5, 6, 7, 8]]
    result = loopq.quantize(model, ids, group_size=16)
    assert list(result.layers) == ["core.weight"]
    with pytest.raises(ConfigError, match=r"Generic\(model, depth='...'\)"):
        loopq.evaluate(model, {"q": result}, ids, n_steps=2)
    named = Generic(model, depth="n_steps")
    for depth in (2, 8):
        _, measured = loopq.evaluate(named, {"q": result}, ids, n_steps=depth)
        assert measured.kl.mean() > 0
        again = loopq.quantize(named, ids, n_steps=depth, group_size=16)
        assert again.layers["core.weight"].report["steps"] == list(range(depth))
    assert "ranks" in loopq.diagnose(named, ids, n_steps=2, only=["ranks"])["sections"]
