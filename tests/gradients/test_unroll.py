"""Rollouts that gradients flow through."""

from __future__ import annotations

import contextlib

import pytest
import torch

from loopq.errors import SystemContractError
from loopq.gradients import unroll as module
from loopq.gradients.unroll import unroll
from tests.support.exact_metric import gradients, linked


def test_unrolled_rollout_is_the_rollout(tiny, tokens):
    batch = next(tokens.batches(3, seed=4))
    plain = tiny.system.rollout(batch, 3)
    torch.testing.assert_close(unroll(tiny.system, batch, 3), plain, rtol=0, atol=0)


def test_a_weight_gets_the_gradient_of_all_steps(tiny, tokens):
    batch = next(tokens.batches(2, seed=0))
    name = "transformer.adapter.weight"
    weight = tiny.model.get_parameter(name)
    reference = tiny.system.rollout(batch, 3)
    leaf = (weight.detach() * 1.05).requires_grad_(True)

    def loss(values):
        with linked(tiny.system, {name: values}):
            out = unroll(tiny.system, batch, 3)
        return torch.nn.functional.mse_loss(out, 2 * reference)

    (grad,) = torch.autograd.grad(loss(leaf), leaf)
    direction = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(0))
    eps = 2e-4
    with torch.no_grad():
        slope = float(loss(leaf + eps * direction) - loss(leaf - eps * direction)) / (2 * eps)
    assert float((grad * direction).sum()) == pytest.approx(slope, rel=0.08)


def test_activations_computed_again_give_the_same_gradient(tiny, tokens, monkeypatch):
    few, name = tokens.take(0, 2), "transformer.adapter.weight"
    kept = [x[name] for x in gradients(tiny.system, few, [name], 3, 0, 2)]
    monkeypatch.setattr(module, "ACTIVATION_BYTES", 0)
    again = [x[name] for x in gradients(tiny.system, few, [name], 3, 0, 2)]
    for one, other in zip(kept, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_rollout_as_a_whole_has_the_gradients_of_its_steps(tiny, tokens, monkeypatch):
    """Systems without a single-step function are differentiated through their own forward."""
    few, name = tokens.take(0, 2), "transformer.adapter.weight"
    by_steps = [x[name] for x in gradients(tiny.system, few, [name], 3, 0, 2)]
    monkeypatch.setattr(type(tiny.system), "has_steps", False)
    as_a_whole = [x[name] for x in gradients(tiny.system, few, [name], 3, 0, 2)]
    for one, other in zip(by_steps, as_a_whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(one.abs().max()))
    batch = next(iter(few.batches(1, 0)))
    assert not tiny.system.rollout(batch, 3).requires_grad


def test_refuses_a_rollout_without_gradients(tiny, tokens, monkeypatch):
    batch = next(tokens.batches(1, 0))
    monkeypatch.setattr(type(tiny.system), "has_steps", False)
    monkeypatch.setattr("loopq.gradients.unroll.differentiable", contextlib.nullcontext)
    with pytest.raises(SystemContractError, match="lets no gradient through"):
        unroll(tiny.system, batch, 3)
