"""The growth of small changes of a state by a step."""

from __future__ import annotations

import pytest
import torch

from benches.zoo import boundary


def test_growth_of_a_linear_step_is_its_largest_factor() -> None:
    torch.manual_seed(0)
    # Symmetric, with eigenvalues 1.5 and below .3: a few turns leave the first direction alone.
    basis = torch.linalg.qr(torch.randn(8, 8)).Q
    matrix = basis @ torch.diag(torch.tensor([1.5, *[0.3] * 7])) @ basis.T
    state = torch.randn(4, 64, 8) * 10
    factors = boundary.growth(lambda s: s @ matrix, state, 3)
    # One position in sixteen is changed.
    assert 4 < len(factors) < 40
    assert factors.tolist() == pytest.approx([1.5] * len(factors), rel=1e-2)
    assert float(boundary.penalty(lambda s: s @ matrix, state, 3, 1.5)) == pytest.approx(0, abs=1e-3)


def test_the_penalty_moves_the_growth_to_its_target() -> None:
    scale = torch.nn.Parameter(torch.tensor(0.5))
    state = torch.ones(2, 64, 4)
    for _ in range(60):
        loss = boundary.penalty(lambda s: s * scale, state, 0, 0.9)
        (slope,) = torch.autograd.grad(loss, scale)
        scale.data -= 0.05 * slope
    assert float(scale.detach()) == pytest.approx(0.9, abs=0.01)
