"""Products taken in the backward pass: against gradients of weights, on layers that are used in awkward ways."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from loopq.errors import NonFiniteError, SystemContractError
from loopq.gradients.sketch import Both, Outputs, Sketch, Taps, cycled, root
from loopq.models.systems.generic import Generic
from loopq.quantizers.loop_metric import ridged

CPU = torch.device("cpu")


class Awkward(nn.Module):
    """Two layers called three times, with changes in place before, between and after; the weights are parameters."""

    def __init__(self, recompute):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 6, bias=False)
        self.recompute = recompute

    def step(self, x):
        inner = self.a(x)
        inner += 1.0
        inner.tanh_()
        out = self.b(inner).view(-1, 2, 6)
        return out.add_(x)

    def forward(self, x):
        for _ in range(3):
            x = checkpoint(self.step, x, use_reentrant=False) if self.recompute else self.step(x)
        return x.square().sum()


def of(model):
    """A system of a model, and tasks of both its layers."""
    shapes = {"a.weight": (6, 10), "b.weight": (10, 6)}
    tasks = [
        SimpleNamespace(
            name=n,
            parameter=SimpleNamespace(
                name=n, owners=(n[0],), in_features=i, out_features=o, orientation="out_in"
            ),
        )
        for n, (i, o) in shapes.items()
    ]
    return _Plain(model), tasks


class _Plain(Generic):
    """An adapter that names parameters by their modules."""

    def parameter(self, shared: Any) -> nn.Parameter:
        return self.model.get_parameter(shared.name)


@pytest.mark.parametrize("recompute", [False, True])
def test_products_are_those_of_the_weights_gradients(recompute):
    model = Awkward(recompute)
    system, tasks = of(model)
    x = torch.randn(4, 2, 6)
    exact = dict(
        zip(
            ("a.weight", "b.weight"),
            torch.autograd.grad(model(x), [model.a.weight, model.b.weight]),
            strict=True,
        )
    )
    sketch = Sketch({n: torch.randn(g.shape[1], 5) for n, g in exact.items()}, 5, 4, 0, 2)
    scales = {n: torch.rand(len(g)) + 0.5 for n, g in exact.items()}
    energy, left, right = {}, {}, {}
    for side in (Outputs(energy, sketch), Both(left, right, {}, scales, sketch)):
        with Taps(system, tasks, side) as taps:
            side.begin(1, 0)
            out = taps.system.model(x)
            taps.backward(out, last=False)
            side.begin(1, 1)
            taps.backward(out, last=True)
    for name, g in exact.items():
        whole = sketch.roots[name]
        product = g @ whole * (len(whole) / 5) ** 0.5
        for found, part in zip(left[name], product.split(4), strict=True):
            torch.testing.assert_close(found, 2 * part @ part.T, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(energy[name], 2 * product.square().sum(1), rtol=1e-4, atol=1e-4)
        # All columns of every block are there: but for products between blocks the sum is exact.
        one = Both({}, {}, {}, scales, sketch)
        expected = torch.zeros_like(right[name])
        for draw in (0, 1):
            one.begin(1, draw)
            thin = one._choose(name)
            expected += g.T @ thin @ thin.T @ g
            for rows in torch.arange(len(g)).split(4):
                own = thin[rows] @ thin[rows].T
                torch.testing.assert_close(own, torch.diag(scales[name][rows] ** 2), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(right[name], expected, rtol=1e-4, atol=1e-4)
    assert all(p.requires_grad for p in model.parameters())


def test_what_cannot_be_multiplied_is_named():
    model = Awkward(False)
    system, tasks = of(model)
    sketch = Sketch({n: torch.eye(k) for n, k in (("a.weight", 6), ("b.weight", 10))}, 5, 4, 0, 1)
    with (
        Taps(system, tasks, Outputs({}, sketch)) as taps,
        pytest.raises(NonFiniteError, match=r"layer [ab]"),
    ):
        taps.backward(taps.system.model(torch.randn(4, 2, 6)) * float("inf"), last=True)
    model.a.register_forward_hook(lambda module, inputs, out: out[..., :4])
    with (
        Taps(system, tasks, Outputs({}, sketch)) as taps,
        pytest.raises(SystemContractError, match=r"layer a\.weight: its"),
    ):
        taps.system.model(torch.randn(4, 2, 6))


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
    """Outputs whose gradients are independent are hardly coupled, those of one pattern nearly as measured."""
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
