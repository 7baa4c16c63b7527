"""Products taken in the backward pass: against gradients of weights, on layers that are used in awkward ways."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from loopq.errors import NonFiniteError, SystemContractError
from loopq.gradients.sketch import Both, Outputs, Sketch
from loopq.gradients.taps import Taps
from loopq.models.systems.generic import Generic


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
        for block, part in zip(left[name], product.split(4), strict=True):
            torch.testing.assert_close(block, 2 * part @ part.T, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(energy[name], 2 * product.square().sum(1), rtol=1e-4, atol=1e-4)
        # All columns of every block are there: but for products between blocks the sum is exact.
        one = Both({}, {}, {}, scales, sketch)
        expected = torch.zeros_like(right[name])
        for draw in (0, 1):
            one.begin(1, draw)
            thin = one._choose(name)
            expected += g.T @ thin @ thin.T @ g
            for rows in torch.arange(len(g)).split(4):
                square = thin[rows] @ thin[rows].T
                torch.testing.assert_close(square, torch.diag(scales[name][rows] ** 2), rtol=1e-5, atol=1e-6)
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
