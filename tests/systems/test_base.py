"""The base of every adapter: parameters with values, and errors of the model's code."""

from __future__ import annotations

import pytest
from torch import nn

from loopq.errors import CalibrationError, ConfigError
from tests.support.odd_models import quantized

from ..soak.inputs import Loop


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Loop(nn.LazyLinear(16)), r"core\.weight has no values \(lazy module"),
        (lambda: Loop().to("meta"), r"embed\.weight has no values \(device meta"),
    ],
)
def test_parameters_without_values(make, match):
    with pytest.raises(ConfigError, match=match):
        quantized(make())


class Fails(Loop):
    """Its core fails at a step, from a call on."""

    def __init__(self, first):
        super().__init__()
        self.calls, self.first = 0, first

    def step(self, x, t):
        self.calls += 1
        if self.calls > self.first:
            raise ValueError("boom\nand more")
        return x + self.core(x)


@pytest.mark.parametrize(
    ("first", "match"),
    [
        (0, r"trial run, before the first layer .*: the model raises ValueError: boom$"),
        (3, r"trial run, after layer core\.weight was called at step 2: the model raises ValueError: boom$"),
        (6, r"rollout of prompt 0, after layer core\.weight was called at step 1: the model raises"),
    ],
)
def test_what_a_forward_raises_names_the_step_and_the_layer(first, match):
    with pytest.raises(CalibrationError, match=match):
        quantized(Fails(first), method="gptq", inputs="open")
