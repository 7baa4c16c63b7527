"""Rounding outside the loop: the chosen parts, their grids, and the refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import loopq
from loopq.errors import ConfigError
from loopq.formats.native import read
from loopq.terminal.progress import Silent


class Around(torch.nn.Module):
    """A loop between layers that are called once; the head is the table."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(96, 64)
        self.before, self.core = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.gate, self.head = torch.nn.Linear(64, 8), torch.nn.Linear(64, 96, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.before(self.table(ids))
        for _ in range(3):
            x = torch.tanh(self.core(x))
        return self.head(x * self.gate(x).mean(-1, keepdim=True))


def test_tables_and_layers_outside_are_rounded_and_stay_tied(tmp_path):
    model = Around()
    ids = [list(range(20))] * 2
    plain = loopq.quantize(model, ids, preset="paper", group_size=32, out=tmp_path / "p")
    whole = loopq.quantize(model, ids, preset="paper", group_size=32, outside=8, out=tmp_path / "w")
    more = {n: layer for n, layer in whole.layers.items() if n not in plain.layers}
    assert "table.weight" in more
    assert "gate.weight" not in whole.layers
    assert more["table.weight"].orientation == "table"
    assert {layer.grid.bits for layer in more.values()} == {8}
    assert all(whole.layers[n].same_as(layer) for n, layer in plain.layers.items())
    assert whole.ties == {"head.weight": "table.weight"}
    assert whole.n_bytes < 0.6 * plain.n_bytes
    again = read(tmp_path / "w")
    for name, layer in more.items():
        assert layer.same_as(again.layers[name])
        value = dict(model.named_parameters())[name].detach().numpy()
        assert np.abs(layer.dequantize() - value).max() < 0.02 * np.abs(value).max()
        assert layer.report["role"] == "outside"


def test_other_formats_and_dumps_are_refused_before_any_work(tmp_path):
    with pytest.raises(ConfigError, match="a dump cannot"):
        loopq.solve(tmp_path / "none", outside=8, out=tmp_path / "q")
    with pytest.raises(ConfigError, match="outside"):
        loopq.quantize(Around(), [[1, 2, 3]], outside=3)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_of_a_looped_decoder_is_rounded(tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "m")
    model, ids = f"looped:{tmp_path / 'm'}[1:2]x2", [list(range(20))] * 2
    whole = loopq.quantize(model, ids, method="rtn", group_size=32, outside=8)
    names = {n for n in whole.layers if "layers." not in n}
    assert names == {"model.embed_tokens.weight"} | ({"lm_head.weight"} if not tied else set())
    assert not [n for n, t in whole.dense.items() if len(t.shape) == 2]


class Gated(Around):
    """A matrix that the loop uses in parts, which cannot be calibrated and is not rounded either."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.Linear(64, 64)

    def forward(self, ids):
        x = self.table(ids)
        for _ in range(2):
            x = torch.tanh(self.core(x)) + torch.nn.functional.linear(x, self.parts.weight[:32]).repeat(
                1, 1, 2
            )
        return self.head(x)


class Notes(Silent):
    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)


def test_what_the_loop_uses_otherwise_stays_and_is_named():
    notes = Notes()
    with pytest.warns(UserWarning, match=r"not quantized: parts\.weight"):
        whole = loopq.quantize(
            Gated(), [list(range(20))] * 2, preset="paper", group_size=32, outside=8, progress=notes
        )
    assert "parts.weight" in whole.dense
    assert "not rounded outside the loop: parts.weight: multiplied in parts" in "\n".join(notes.lines)
