"""Weights of a model as they are stored."""

from __future__ import annotations

import pytest
import torch

import loopq
from loopq.errors import NonFiniteError
from loopq.storage.model_files import model_tensors
from loopq.storage.weights import ModelWeights


def test_a_checkpoint_does_not_change_with_the_model(loaded, tokens):
    result = loopq.quantize(loaded, tokens, method="rtn")
    before = {name: tensor.data.tobytes() for name, tensor in result.dense.items()}
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(1.0)
    assert before == {name: tensor.data.tobytes() for name, tensor in result.dense.items()}


def test_a_weight_that_is_not_finite_is_named_with_its_place(tiny):
    parameter = next(iter(tiny.system.shared_parameters(2)))
    with torch.no_grad():
        dict(tiny.model.named_parameters())[parameter.name][1, 2] = float("nan")
    with pytest.raises(NonFiniteError, match=rf"layer {parameter.name}: weight\[\d+, \d+\] is nan"):
        ModelWeights(*model_tensors(tiny.model)).oriented(parameter)
