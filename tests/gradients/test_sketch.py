"""Thin matrices of the gradients' products: their columns, blocks and noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopq.gradients.sketch import Both, Sketch, cycled, root
from loopq.quantizers.loop_metric import ridged

CPU = torch.device("cpu")


def test_columns_of_a_root_say_alike_whatever_is_chosen():
    """All columns give the inverse, of badly scaled matrices too; gradients in turn go through all of them."""
    rng = np.random.default_rng(0)
    scales = 10.0 ** rng.uniform(-4, 4, 12)
    x = rng.normal(size=(30, 12)) * scales
    matrix = x.T @ x
    whole = root(matrix, 0.01, [3], 12, CPU).double().numpy()
    unscaled = whole * scales[:, None]
    inverse = np.linalg.inv(ridged(x.T @ x, 0.01)) * scales * scales[:, None]
    np.testing.assert_allclose(unscaled @ unscaled.T, inverse, rtol=1e-4, atol=1e-5 * inverse.max())
    np.testing.assert_array_equal(whole[:, :5], root(matrix, 0.01, [3], 5, CPU).double().numpy())
    total = np.zeros((12, 12))
    for number in range(12):
        chosen, scale = cycled(12, 12, 5, number)
        total += scale**2 * unscaled[:, chosen] @ unscaled[:, chosen].T / 12
    np.testing.assert_allclose(total, unscaled @ unscaled.T, rtol=1e-6, atol=1e-9)
    sizes = np.square(unscaled).sum(0)
    assert sizes.max() < 12 * sizes.min()


def test_products_between_blocks_vanish_on_average():
    side = Both({}, {}, {}, {"w": torch.ones(10)}, Sketch({}, 3, 6, 0, 1))
    total = torch.zeros(10, 10)
    for number in range(2000):
        side.begin(number, 0)
        thin = side._choose("w")
        total += thin @ thin.T / 2000
    torch.testing.assert_close(total, torch.eye(10), rtol=0, atol=0.1)


@pytest.mark.parametrize(("shared", "low", "high"), [(0.0, 0.0, 0.2), (1.0, 0.9, 1.0)])
def test_couplings_lose_their_noise(shared, low, high):
    """Outputs with independent gradients are hardly coupled; outputs of one pattern are coupled nearly as
    measured."""
    generator = torch.Generator().manual_seed(3)
    pattern, loud = torch.ones(10, 1), torch.tensor([1.0] * 9 + [1e4])
    side = Both({}, {}, {}, {"w": 1 / loud}, Sketch({}, 3, 16, 0, 1))
    for _ in range(40):
        noise = torch.randn(10, 3, generator=generator)
        common = pattern * torch.randn(1, 3, generator=generator)
        rows = (shared * common + (1 - shared) * noise) * loud[:, None]
        side.add("w", (rows, torch.zeros(4, 1)))
    before = side.left["w"][0].clone()
    side.finish(40)
    after = side.left["w"][0]
    torch.testing.assert_close(after.diagonal(), before.diagonal())
    kept = (after / before)[~torch.eye(10, dtype=torch.bool)]
    torch.testing.assert_close(kept, kept[:1].expand_as(kept))
    assert low <= float(kept[0]) <= high
    side.finish(1)
    assert after.equal(torch.diag(before.diagonal()))
