"""The embedded model's class."""

from __future__ import annotations

import math

import torch

from tests.support.systems import small
from tests.support.zoo import IDS


@torch.no_grad()
def test_huginn_draws_its_start_from_the_global_generator() -> None:
    model = small("huginn")()
    noise = model.initialize_state(torch.zeros(4, 64, 32))
    std = math.sqrt(0.4)
    assert noise.abs().max() <= 3 * std
    # Cutting at three standard deviations takes 2.7 % of the variance.
    assert abs(float(noise.var()) / std**2 - 0.973) < 0.05
    torch.manual_seed(1)
    a, b = model(IDS).logits, model(IDS).logits
    torch.manual_seed(1)
    assert torch.equal(a, model(IDS).logits)
    assert not torch.equal(a, b)


def test_huginn_counts_steps_with_gradient_apart() -> None:
    model = small("huginn", mean_recurrence=3)()
    states = torch.randn(3, 12, 32)
    plain = model(IDS, input_states=states, num_steps=3).logits
    pair = model(IDS, input_states=states, num_steps=(1, 2)).logits
    assert torch.equal(plain, pair)
    adapter = model.transformer.adapter.weight
    assert torch.autograd.grad(plain.sum(), adapter, allow_unused=True)[0] is None
    assert torch.autograd.grad(pair.sum(), adapter)[0].abs().sum() > 0
