"""The map of one step, and its Jacobian."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopq.analysis.diagnosis import weights
from loopq.analysis.diagnosis.context import Context
from loopq.errors import ConfigError, SystemContractError
from loopq.paper.diagnosis import bypass, stepmap
from tests.support.looptoys import LinearSystem, numpy_rounder, tokens
from tests.support.stepmaps import INT4, operating
from tests.support.systems import CASES, open_system, prompts


def test_jacobian_product_equals_matrix_and_finite_difference(system):
    _, embedding, state = operating(system)
    step = stepmap.StepMap(system, embedding, 7, 8)
    v = torch.randn(state.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    image = step.product(state, v)
    np.testing.assert_allclose(image[0].numpy(), v[0].numpy() @ system.model.jacobian().T, rtol=1e-12)
    with torch.no_grad():
        finite = (step(state + 1e-6 * v) - step(state - 1e-6 * v)) / 2e-6
    torch.testing.assert_close(image, finite, rtol=1e-6, atol=1e-8)
    u = torch.randn(state.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    np.testing.assert_allclose(step.transposed(state)(u)[0].numpy(), u[0].numpy() @ system.model.jacobian())


def test_fast_products_are_the_exact_ones(system):
    _, embedding, state = operating(system)
    step = stepmap.StepMap(system, embedding, 7, 8)
    times, how = step.products(state)
    assert how == "reverse over reverse"
    v = torch.randn(state.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(times(v), step.product(state, v), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(times(-3 * v), -3 * step.product(state, v), rtol=1e-12, atol=1e-14)

    class Blocked(LinearSystem):
        def step(self, state, embedding, t, n_steps):
            with torch.no_grad():
                return super().step(state, embedding, t, n_steps)

    blocked = stepmap.StepMap(Blocked(system.model), embedding, 7, 8)
    times, how = blocked.products(state)
    assert how == "forward mode"
    torch.testing.assert_close(times(v), step.product(state, v))


def test_blocked_gradients_are_noticed(system):
    class Blocked(LinearSystem):
        def step(self, state, embedding, t, n_steps):
            with torch.no_grad():
                return super().step(state, embedding, t, n_steps)

    class Detached(LinearSystem):
        def step(self, state, embedding, t, n_steps):
            return super().step(state.detach(), embedding, t, n_steps)

    _, embedding, state = operating(system)
    with pytest.raises(SystemContractError, match="blocks gradients"):
        stepmap.StepMap(Blocked(system.model), embedding, 7, 8).transposed(state)
    with pytest.raises(SystemContractError, match="detaches its input"):
        stepmap.StepMap(Detached(system.model), embedding, 7, 8).check(state)


def test_two_modes_that_disagree_are_noticed(system):
    class Twofold(torch.autograd.Function):
        """x; its derivative is 1 forwards and 2 backwards."""

        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def jvp(ctx, tangent):
            return tangent.clone()

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    class Unequal(LinearSystem):
        def step(self, state, embedding, t, n_steps):
            return Twofold.apply(super().step(state, embedding, t, n_steps))

    _, embedding, state = operating(system)
    with pytest.raises(SystemContractError, match="two exact methods for J v differ"):
        stepmap.StepMap(Unequal(system.model), embedding, 7, 8).products(state)


def test_promotion_is_lossless_and_undone():
    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.RMSNorm(4, eps=None, dtype=torch.bfloat16)
            self.linear = torch.nn.Linear(4, 4, dtype=torch.bfloat16)

    model = Norm()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with stepmap.promoted(model):
        assert all(p.dtype == torch.float32 for p in model.parameters())
        assert model.inner.eps == torch.finfo(torch.bfloat16).eps
        assert torch.equal(model.linear.weight.bfloat16(), before["linear.weight"])
    assert model.inner.eps is None
    assert all(torch.equal(v, before[k]) and v.dtype == torch.bfloat16 for k, v in model.state_dict().items())


def test_directions_in_one_batch_give_what_they_give_apart(system):
    class Wrapped(LinearSystem):
        def embed(self, batch):
            return [super().embed(batch)]

        def step(self, state, embedding, t, n_steps):
            return super().step(state, embedding[0], t, n_steps)

    new = weights.rounded(system, system.shared_parameters(8)[:1], INT4, numpy_rounder)
    data = tokens(n_prompts=1)
    together, apart = (
        bypass.bypass_study(
            Context(s, data, 8), new, radii=(0.01,), n_directions=5, seeds=(0,), n_resamples=2
        )["rows"]
        for s in (system, Wrapped(system.model))
    )
    for one, other in zip(together, apart, strict=True):
        assert one["D0"] == pytest.approx(other["D0"], rel=1e-9)
        assert one["D1"] == pytest.approx(other["D1"], rel=1e-9)


def test_the_factors_of_a_step_multiply_to_its_jacobian():
    system, batch = open_system(CASES["Huginn"]), prompts(CASES["Huginn"], n_prompts=1)
    embedding, state = stepmap.final_state(system, batch, 3)
    factors = stepmap.factors(stepmap.StepMap(system, embedding, 2, 3), state, n_directions=32)
    adapter, *blocks = factors["gain"]
    assert (adapter, len(blocks)) == ("transformer.adapter", 2)
    assert factors["gap"] < 1e-4
    w = system.model.transformer.adapter.weight[:, :32].detach().double()
    assert factors["gain"][adapter] == pytest.approx(float(w.norm()) / 32**0.5, rel=0.05)
    assert factors["identity"][adapter] == pytest.approx(float(w.trace() / w.norm()) / 32**0.5, abs=0.05)
    # An identity path around the adapter is a term that the product lacks.
    with stepmap.Bypass(system, 3) as bypass:
        other = stepmap.factors(stepmap.StepMap(system, embedding, 2, 3, bypass), state)
    assert other["gap"] > 0.1


def test_a_step_without_one_adapter_has_no_factors():
    system = open_system(CASES["Ouro"])
    with pytest.raises(ConfigError, match="one exposed adapter; it has 0"):
        stepmap.factors(stepmap.StepMap(system, None, 0, 3), torch.zeros(1, 2, 32))
