"""Derivatives along errors of weights, against whole gradients."""

from __future__ import annotations

import torch

from loopq.gradients.backward import Backward
from loopq.gradients.directions import Directions
from loopq.quantizers.config import LayerConfig
from loopq.quantizers.task import Task
from tests.support.exact_metric import gradients


def test_squares_are_those_of_whole_gradients(tiny, tokens):
    few, name = tokens.take(0, 2), "transformer.adapter.weight"
    parameter = next(p for p in tiny.system.shared_parameters(3) if p.name == name)
    errors = torch.randn(2, *tiny.model.get_parameter(name).shape, generator=torch.Generator().manual_seed(0))
    side = Directions({name: errors}, {})
    for _ in Backward(tiny.system, few, 3, 2, 0).run(side, [Task(parameter, LayerConfig(), (), None)], 0, 2):
        pass
    each = [(g[name] * errors).double().sum((1, 2)) for g in gradients(tiny.system, few, [name], 3, 0, 2)]
    expected = torch.stack(each).square().sum(0)
    torch.testing.assert_close(side.totals[name], expected, rtol=1e-3, atol=0)
