"""Weights of a model as they are stored."""

from __future__ import annotations

import torch

import loopq


def test_a_checkpoint_does_not_change_with_the_model(loaded, tokens):
    result = loopq.quantize(loaded, tokens, method="rtn")
    before = {name: tensor.data.tobytes() for name, tensor in result.dense.items()}
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(1.0)
    assert before == {name: tensor.data.tobytes() for name, tensor in result.dense.items()}
