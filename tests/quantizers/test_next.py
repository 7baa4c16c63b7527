"""Experiments of benches/next: their algebra against the plain formula, codes against what a file would hold."""

import numpy as np
import pytest

from benches.next.corrections import eight_bits
from benches.next.sides import TwoSided, conditional_order, pivots, solve
from benches.next.table import paired
from benches.next.vectors import Vectors, lattice, levels


def definite(n, seed):
    rows = np.random.default_rng(seed).standard_normal((2 * n, n))
    return rows.T @ rows / n + 0.1 * np.eye(n)


def sides(rows=16, columns=12, group=6):
    weight = np.random.default_rng(3).standard_normal((rows, columns))
    return TwoSided(weight, definite(rows, 1), definite(columns, 2), group)


def quiet(what, loss):
    """Nothing is kept of how the loss fell."""


def test_a_metric_is_the_sum_over_decisions():
    metric = definite(7, 0)
    pivot, feedback = pivots(metric)
    assert np.allclose(np.tril(feedback), feedback)
    assert np.allclose(feedback.T @ (pivot[:, None] * feedback), metric)
    assert np.isclose(pivot[0], 1 / np.linalg.inv(metric)[0, 0])


def test_the_dearest_column_that_others_make_up_for_comes_first():
    metric = definite(6, 4)
    order = conditional_order(metric)
    left = list(range(6))
    for j in order:
        costs = 1 / np.diag(np.linalg.inv(metric[np.ix_(left, left)]))
        assert left[int(np.argmax(costs))] == j
        left.remove(int(j))


def test_scales_of_least_loss_have_no_gradient():
    problem = sides()
    codes = np.random.default_rng(5).integers(-2, 2, problem.weight.shape).astype(float)
    scales = problem.refitted(codes, np.full((16, 2), 0.5))
    base = problem.loss(codes * scales[:, problem.groups])
    for change in (0.98, 1.02):
        moved = scales.copy()
        moved[3, 1] *= change
        assert problem.loss(codes * moved[:, problem.groups]) > base


@pytest.mark.parametrize("bits", [2, 3])
def test_a_descent_lowers_the_loss_and_vectors_beat_single_levels(bits):
    problem = sides()
    losses = {}
    for name, points in (("levels", levels(bits)), ("lattice", lattice(bits))):
        for passes in (0, 1):
            factor = 1.25 if points is lattice(3) else 1.0
            codes, scales = solve(problem, Vectors(problem.left, points), factor, passes, quiet)
            losses[name, passes] = problem.loss(codes * scales[:, problem.groups])
        assert losses[name, 1] <= losses[name, 0]
    assert losses["lattice", 1] < losses["levels", 1]


@pytest.mark.parametrize(("bits", "shape"), [(2, (65536, 8)), (3, (4096, 4))])
def test_a_table_holds_distinct_points_of_unit_size(bits, shape):
    points = lattice(bits)
    assert points.shape == shape
    assert len(np.unique(points, axis=0)) == shape[0]
    assert np.isclose(np.mean(np.square(points)), 1, atol=1e-4)


def test_corrections_in_eight_bits_are_off_by_half_a_step_at_most():
    torch = pytest.importorskip("torch")
    values = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    stored = eight_bits(values)
    assert ((stored - values).abs() <= 0.51 * values.abs().amax(dim=1, keepdim=True) / 127).all()


def test_a_ratio_pairs_draws_and_prompts():
    rows = [
        {"method": m, "draw": d, "kl_by_prompt": [k * 1.0, k * 3.0], "n_bytes": b}
        for m, d, k, b in (("best", 0, 2, 100), ("x", 0, 1, 101), ("x", 1, 9, 101))
    ]
    found = paired(rows, "x")
    assert found is not None
    assert (found.estimate, found.n_draws, found.n_bytes) == (0.5, 1, 1.01)
    assert np.allclose(found.resampled, 0.5)
