"""Spectral radii of matrices that are known, Jacobians against finite differences, the identity bypass."""

import numpy as np
import pytest

from loopq.analysis.diagnosis import weights
from loopq.analysis.diagnosis.context import Context
from loopq.errors import ConfigError
from loopq.paper.diagnosis import spectral, stepmap
from tests.support.looptoys import BlindSystem, LinearLoop, numpy_rounder, tokens
from tests.support.stepmaps import INT4, operating


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
    radius = radius_of(basis @ np.diag(values) @ np.linalg.inv(basis))
    assert radius.accepted
    assert radius.radius == pytest.approx(1.25, rel=1e-6)
    assert radius.residual < 1e-5


def test_radius_of_a_complex_pair_is_its_magnitude():
    n, angle = 200, 0.7
    matrix = np.diag(np.linspace(0.1, 0.8, n))
    matrix[:2, :2] = 1.07 * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    radius = radius_of(matrix)
    assert radius.accepted
    assert radius.radius == pytest.approx(1.07, rel=1e-6)


@pytest.mark.parametrize("n", [2, 5, 200])
def test_nilpotent_blocks_have_radius_zero_and_norm_above(n):
    block = np.zeros((n, n))
    block[np.arange(0, n - 1, 2), np.arange(1, n, 2)] = 3.0
    radius = radius_of(block)
    assert radius.radius < 1e-6
    assert radius.accepted
    assert spectral.spectral_norm(lambda v: block @ v, lambda v: block.T @ v, n) == pytest.approx(3.0)


def test_jordan_block_of_full_length():
    block = np.diag(np.ones(7), 1)
    assert radius_of(block).radius == pytest.approx(0.0, abs=1e-12)
    assert spectral.spectral_norm(lambda v: block @ v, lambda v: block.T @ v, 8) == pytest.approx(1.0)


def test_norm_of_a_large_matrix():
    matrix = np.random.default_rng(0).normal(size=(150, 150))
    norm = spectral.spectral_norm(lambda v: matrix @ v, lambda v: matrix.T @ v, 150)
    assert norm == pytest.approx(np.linalg.norm(matrix, 2), rel=1e-4)


def test_rules_refuse_what_did_not_converge():
    # A rotation by many angles of one magnitude: no single direction wins within few products.
    rng = np.random.default_rng(0)
    q = np.linalg.qr(rng.normal(size=(400, 400)))[0]
    radius = radius_of(q, max_products=80)
    assert not radius.accepted
    assert "80 products" in radius.failure
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


def test_radius_of_a_step_is_that_of_its_jacobian(system):
    # 30 positions of width 6: above the dense limit, so this is the Arnoldi path on Jacobian products.
    _, embedding, state = operating(system, n_tokens=30)
    jacobian = spectral.jacobian_at(stepmap.StepMap(system, embedding, 7, 8), state, with_norm=True)
    j = system.model.jacobian()
    assert jacobian["accepted"]
    assert jacobian["radius"] == pytest.approx(np.abs(np.linalg.eigvals(j)).max(), rel=1e-4)
    assert jacobian["norm"] == pytest.approx(np.linalg.norm(j, 2), rel=1e-4)


def test_radius_study_on_a_linear_loop(system):
    new = weights.rounded(system, system.shared_parameters(8)[:1], INT4, numpy_rounder)
    study = spectral.radius_study(Context(system, tokens(n_prompts=2), 8), new)
    assert study["acceptance"]["n_maps"] == 2 * 2 * 4
    assert study["acceptance"]["n_accepted"] == 16
    assert study["acceptance"]["largest_residual"] < 1e-6
    plain = study["states"]["plain"]
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
