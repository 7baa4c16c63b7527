"""What is outside the loop, rounded: what of it, to what, and where that cannot be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import loopq
from loopq.errors import ConfigError
from loopq.formats.native import read


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


def test_tables_and_layers_beside_the_loop_are_rounded_and_stay_tied(tmp_path):
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
