"""Thin matrices of the gradients' products: their columns, blocks and noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopq.gradients.sketch import Both, Sketch, cycled, root
from loopq.layers.shared import SharedParameter
from loopq.quantizers.config import LayerConfig
from loopq.quantizers.loop_metric import ridged
from loopq.quantizers.task import Task

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


@pytest.mark.parametrize(("n_gradients", "n_steps"), [(1, 600), (600, 1), (12, 12)])
def test_sums_of_bfloat16_rows_are_those_in_float64(n_gradients, n_steps):
    """Of 600 like parts, a sum in bfloat16 would lose more than half."""
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(8, 8, generator=generator)
    side = Both({}, {}, {}, {"w": torch.full((10,), 0.5)}, Sketch({"w": whole}, 3, 6, 0, 1))
    task = Task(SharedParameter("w", ("w",), 8, 10, "out_in", 1, "mlp"), LayerConfig(), (), None)
    blocks = [torch.zeros(n, n, dtype=torch.float64) for n in (6, 4)]
    right, spread = torch.zeros(8, 8, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for number in range(n_gradients):
        side.begin(number, 0)
        gradient = torch.zeros(10, 8, dtype=torch.float64)
        for _ in range(n_steps):
            x, d = ((1 + 0.2 * torch.randn(4, n, generator=generator)).bfloat16() for n in (8, 10))
            side.take("w", side.keep(task, x), d)
            gradient += d.double().T @ x.double()
        chosen, scale = cycled(8, 8, 3, number)
        for i, part in enumerate((gradient @ whole[:, chosen].double() * scale).split(6)):
            square = part @ part.T
            blocks[i] += square
            spread[i] += (square.square().sum() - square.diagonal().square().sum()) / 16
        thin = gradient.T @ side._thin["w"].double()
        right += thin @ thin.T
        side.end()
    parts = [*side.left["w"], side.right["w"], side.spread["w"]]
    assert all(x.dtype == torch.float32 for x in parts)
    for value, expected in zip(parts, [*blocks, right, spread], strict=True):
        assert float((value - expected).norm() / expected.norm()) < 0.03


def test_sums_of_bfloat16_rows_have_no_negative_direction():
    """One direction is a thousand times as strong as the others."""
    generator = torch.Generator().manual_seed(6)
    side = Both({}, {}, {}, {"w": torch.ones(64)}, Sketch({"w": torch.eye(64)}, 3, 64, 0, 1))
    task = Task(SharedParameter("w", ("w",), 64, 64, "out_in", 1, "mlp"), LayerConfig(), (), None)
    for number in range(30):
        side.begin(number, 0)
        x, d = ((30 + torch.randn(4, 64, generator=generator)).bfloat16() for _ in range(2))
        side.take("w", side.keep(task, x), d)
        side.end()
    for found in (side.right["w"], *side.left["w"]):
        values = torch.linalg.eigvalsh(found.double())
        assert values[0] > -1e-6 * values[-1]
