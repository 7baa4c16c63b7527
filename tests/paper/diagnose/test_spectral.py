"""Spectral radii of matrices that are known, Jacobians against finite differences, the identity bypass."""

import numpy as np
import pytest
import torch

from loopq.diagnose import weights
from loopq.diagnose.context import Context
from loopq.errors import ConfigError, SystemContractError
from loopq.paper.diagnose import bypass, spectral, stepmap
from loopq.quantizers.config import LayerConfig
from tests.support.looptoys import BlindSystem, LinearLoop, LinearSystem, numpy_rounder, tokens

INT4 = LayerConfig.of(bits=4, group_size=-1)


def radius_of(matrix, **settings):
    starts = spectral.start_vectors(len(matrix))
    return spectral.spectral_radius(
        lambda v: matrix @ v, len(matrix), starts, spectral.ArnoldiSettings(**settings)
    )


def test_radius_of_a_random_matrix_with_a_known_spectrum():
    rng = np.random.default_rng(0)
    n = 300
    basis = rng.normal(size=(n, n)) / np.sqrt(n) + 2 * np.eye(n)
    values = np.concatenate([[1.25, -1.1], rng.uniform(-0.9, 0.9, n - 2)])
    found = radius_of(basis @ np.diag(values) @ np.linalg.inv(basis))
    assert found.accepted
    assert found.radius == pytest.approx(1.25, rel=1e-6)
    assert found.residual < 1e-5


def test_radius_of_a_complex_pair_is_its_magnitude():
    n, angle = 200, 0.7
    matrix = np.diag(np.linspace(0.1, 0.8, n))
    matrix[:2, :2] = 1.07 * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    found = radius_of(matrix)
    assert found.accepted
    assert found.radius == pytest.approx(1.07, rel=1e-6)


@pytest.mark.parametrize("n", [2, 5, 200])
def test_nilpotent_blocks_have_radius_zero_and_norm_above(n):
    block = np.zeros((n, n))
    block[np.arange(0, n - 1, 2), np.arange(1, n, 2)] = 3.0
    found = radius_of(block)
    assert found.radius < 1e-6
    assert found.accepted
    assert spectral.spectral_norm(lambda v: block @ v, lambda v: block.T @ v, n) == pytest.approx(3.0)


def test_jordan_block_of_full_length():
    block = np.diag(np.ones(7), 1)
    assert radius_of(block).radius == pytest.approx(0.0, abs=1e-12)
    assert spectral.spectral_norm(lambda v: block @ v, lambda v: block.T @ v, 8) == pytest.approx(1.0)


def test_norm_of_a_large_matrix():
    matrix = np.random.default_rng(0).normal(size=(150, 150))
    found = spectral.spectral_norm(lambda v: matrix @ v, lambda v: matrix.T @ v, 150)
    assert found == pytest.approx(np.linalg.norm(matrix, 2), rel=1e-4)


def test_rules_refuse_what_did_not_converge():
    # A rotation by many angles of one magnitude: no single direction wins within few products.
    rng = np.random.default_rng(0)
    q = np.linalg.qr(rng.normal(size=(400, 400)))[0]
    found = radius_of(q, max_products=80)
    assert not found.accepted
    assert "80 products" in found.failure
    matrix = np.diag(np.linspace(0.5, 1.0, 100))
    loose = radius_of(matrix, residual_limit=1e-18)
    assert not loose.accepted
    assert "residual" in loose.failure
    # Two invariant halves, each start in one of them.
    starts = [np.concatenate([np.ones(100), np.zeros(100)]), np.concatenate([np.zeros(100), np.ones(100)])]
    diagonal = np.concatenate([np.linspace(0.1, 1.0, 100), np.linspace(0.1, 0.5, 100)])
    split = spectral.spectral_radius(lambda v: diagonal * v, 200, starts)
    assert not split.accepted
    assert "differ" in split.failure


@pytest.fixture
def system():
    return LinearSystem(LinearLoop())


def operating(system, n_tokens=3):
    (batch,) = tokens(n_prompts=1, n_tokens=n_tokens).batches(1)
    return batch, *stepmap.final_state(system, batch, 8)


def test_jacobian_product_is_the_matrix_and_the_finite_difference(system):
    _, embedding, state = operating(system)
    step = stepmap.StepMap(system, embedding, 7, 8)
    v = torch.randn(state.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = step.product(state, v)
    np.testing.assert_allclose(found[0].numpy(), v[0].numpy() @ system.model.jacobian().T, rtol=1e-12)
    with torch.no_grad():
        finite = (step(state + 1e-6 * v) - step(state - 1e-6 * v)) / 2e-6
    torch.testing.assert_close(found, finite, rtol=1e-6, atol=1e-8)
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


def test_radius_of_a_step_is_that_of_its_jacobian(system):
    # 30 positions of width 6: above the dense limit, so this is the Arnoldi path on Jacobian products.
    _, embedding, state = operating(system, n_tokens=30)
    found = spectral.jacobian_at(stepmap.StepMap(system, embedding, 7, 8), state, with_norm=True)
    j = system.model.jacobian()
    assert found["accepted"]
    assert found["radius"] == pytest.approx(np.abs(np.linalg.eigvals(j)).max(), rel=1e-4)
    assert found["norm"] == pytest.approx(np.linalg.norm(j, 2), rel=1e-4)


def test_bypass_adds_the_identity_to_the_right_factor(system):
    _, embedding, state = operating(system)
    v = torch.randn(state.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    core = np.eye(6) + system.model.core.weight.detach().numpy()
    state_half = system.model.adapter.weight.detach().numpy()[:, :6]
    with stepmap.Bypass(system, 8) as path:
        found = stepmap.StepMap(system, embedding, 7, 8, path).product(state, v)
    np.testing.assert_allclose(
        found[0].numpy(), v[0].numpy() @ (core @ (state_half + np.eye(6))).T, rtol=1e-12
    )
    plain = stepmap.StepMap(system, embedding, 7, 8).product(state, v)
    assert not torch.allclose(plain, found)


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


def test_radius_study_on_a_linear_loop(system):
    new = weights.rounded(system, system.shared_parameters(8)[:1], INT4, numpy_rounder)
    found = spectral.radius_study(Context(system, tokens(n_prompts=2), 8), new)
    assert found["acceptance"]["n_maps"] == 2 * 2 * 4
    assert found["acceptance"]["n_accepted"] == 16
    assert found["acceptance"]["largest_residual"] < 1e-6
    plain = found["states"]["plain"]
    q = np.asarray(new["adapter.weight"], np.float64)
    core = np.eye(6) + system.model.core.weight.detach().numpy()

    def rho(m):
        return np.abs(np.linalg.eigvals(m)).max()

    expected = {
        "reference": rho(system.model.jacobian()),
        "changed": rho(system.model.jacobian(q)),
        "reference, bypass": rho(system.model.jacobian() + core),
        "changed, bypass": rho(system.model.jacobian(q) + core),
    }
    for name, value in expected.items():
        assert plain["maps"][name]["radius"]["estimate"] == pytest.approx(value, rel=1e-6)
        assert plain["maps"][name]["above_one"] == 2 * (value > 1)
    did = (expected["changed, bypass"] - expected["reference, bypass"]) - (
        expected["changed"] - expected["reference"]
    )
    assert plain["did"]["estimate"] == pytest.approx(did, abs=1e-6)
    assert plain["maps"]["changed"]["norm"]["estimate"] == pytest.approx(
        np.linalg.norm(system.model.jacobian(q), 2)
    )
    with pytest.raises(ConfigError, match="no Jacobian"):
        spectral.radius_study(Context(BlindSystem(LinearLoop()), tokens(), 8), {})


def test_bypass_study_closed_form_on_a_linear_loop(system):
    new = weights.rounded(system, system.shared_parameters(8)[:1], INT4, numpy_rounder)
    data = tokens(n_prompts=2)
    found = bypass.bypass_study(Context(system, data, 8), new, seeds=(0,), n_directions=16, n_resamples=50)
    directions = bypass.unit_directions((1, 5, 6), 16, 0).numpy()
    np.testing.assert_allclose(np.linalg.norm(directions.reshape(16, -1), axis=1), 1.0)
    j, jq = system.model.jacobian(), system.model.jacobian(new["adapter.weight"])
    core = np.eye(6) + system.model.core.weight.detach().numpy()
    top = np.sum((directions @ (jq - j).T) ** 2)
    expected = [np.sqrt(top / np.sum((directions @ m.T) ** 2)) for m in (j, j + core)]
    assert len(found["rows"]) == 2 * 3
    for row in found["rows"]:
        # A linear map has one response at every state and radius.
        assert (row["D0"], row["D1"]) == pytest.approx(expected, rel=1e-7)
        assert row["attenuation"] == pytest.approx(1 - expected[1] / expected[0], rel=1e-6)
        # Without the normalisation the identity path changes nothing in a linear loop.
        assert row["rms_attenuation"]["estimate"] == pytest.approx(0.0, abs=1e-7)
        assert row["rms_without"] == pytest.approx(np.sqrt(top / 16), rel=1e-7)
        assert row["p_holm"] == 1.0
    assert 0 <= found["bypass_agreement"] <= 1


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
