"""An identity around the adapter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopq.analysis.diagnosis import weights
from loopq.analysis.diagnosis.context import Context
from loopq.errors import ConfigError, SystemContractError
from loopq.paper.diagnosis import bypass, stepmap
from tests.support.looptoys import BlindSystem, LinearLoop, LinearSystem, numpy_rounder, tokens
from tests.support.stepmaps import INT4, operating


def test_bypass_adds_the_identity_to_the_right_factor(system):
    _, embedding, state = operating(system)
    v = torch.randn(state.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    core = np.eye(6) + system.model.core.weight.detach().numpy()
    state_half = system.model.adapter.weight.detach().numpy()[:, :6]
    with stepmap.Bypass(system, 8) as path:
        image = stepmap.StepMap(system, embedding, 7, 8, path).product(state, v)
    np.testing.assert_allclose(
        image[0].numpy(), v[0].numpy() @ (core @ (state_half + np.eye(6))).T, rtol=1e-12
    )
    plain = stepmap.StepMap(system, embedding, 7, 8).product(state, v)
    assert not torch.allclose(plain, image)


def test_bypass_is_gone_after_the_block(system):
    _, embedding, state = operating(system)
    with torch.no_grad():
        before = system.step(state, embedding, 0, 8)
        with stepmap.Bypass(system, 8) as path:
            assert not torch.equal(path.step(state, embedding, 0, 8), before)
            assert torch.equal(system.step(state, embedding, 0, 8), before)
        assert torch.equal(system.step(state, embedding, 0, 8), before)


def test_bypass_needs_an_adapter_that_is_called(system):
    with pytest.raises(ConfigError, match="blind-toy"):
        stepmap.Bypass(BlindSystem(LinearLoop()), 8)

    class Functional(LinearSystem):
        def step(self, state, embedding, t, n_steps):
            return torch.cat([state, embedding], -1) @ self.model.adapter.weight.T

    functional = Functional(LinearLoop())
    _, embedding, state = operating(functional)
    with stepmap.Bypass(functional, 8) as path, pytest.raises(SystemContractError, match="was not called"):
        path.step(state, embedding, 0, 8)

    class Flat(LinearSystem):
        def step(self, state, embedding, t, n_steps):
            return super().step(state.flatten(0, 1), embedding.flatten(0, 1), t, n_steps).view_as(state)

    flat = Flat(LinearLoop())
    with stepmap.Bypass(flat, 8) as path, pytest.raises(SystemContractError, match="needs equal shapes"):
        path.step(state, embedding, 0, 8)


def test_a_bypass_study_needs_radii_above_zero(system):
    for radii in ((), (0.1, 0.0)):
        with pytest.raises(ConfigError, match="radii must be above 0"):
            bypass.bypass_study(Context(system, tokens(), 8), {}, radii=radii)


def test_bypass_study_closed_form_on_a_linear_loop(system):
    new = weights.rounded(system, system.shared_parameters(8)[:1], INT4, numpy_rounder)
    data = tokens(n_prompts=2)
    study = bypass.bypass_study(Context(system, data, 8), new, seeds=(0,), n_directions=16, n_resamples=50)
    directions = bypass.unit_directions((1, 5, 6), 16, 0).numpy()
    np.testing.assert_allclose(np.linalg.norm(directions.reshape(16, -1), axis=1), 1.0)
    j, jq = system.model.jacobian(), system.model.jacobian(new["adapter.weight"])
    core = np.eye(6) + system.model.core.weight.detach().numpy()
    top = np.sum((directions @ (jq - j).T) ** 2)
    expected = [np.sqrt(top / np.sum((directions @ m.T) ** 2)) for m in (j, j + core)]
    assert len(study["rows"]) == 2 * 3
    for row in study["rows"]:
        # A linear map has one response at every state and radius.
        assert (row["D0"], row["D1"]) == pytest.approx(expected, rel=1e-7)
        assert row["attenuation"] == pytest.approx(1 - expected[1] / expected[0], rel=1e-6)
        # Without the normalisation the identity path changes nothing in a linear loop.
        assert row["rms_attenuation"]["estimate"] == pytest.approx(0.0, abs=1e-7)
        assert row["rms_without"] == pytest.approx(np.sqrt(top / 16), rel=1e-7)
        assert row["p_holm"] == 1.0
    assert 0 <= study["bypass_agreement"] <= 1
