"""The solver under a metric between outputs: against its NumPy twin, brute force, and the laws it must keep."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import loopq._native as native
from loopq.errors import ConfigError, SolveError
from tests.support import core
from tests.support import gptq_cd_reference as reference
from tests.support.problems import correlated, values_of

GRID = {"bits": 3, "group_size": 16, "symmetric": True, "signed": True, "scale_dtype": "float16"}
REST = {"beam": 1, "sweeps": 30, "rounds": 4, "refit": True}
SETTINGS = core.cd_settings(**GRID, **REST)


def factor(hessian, mu):
    return native.DampedFactor(hessian, mu, order="conditional", threads=1)


def made(rows, d, seed=0):
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(rows, d)).astype(np.float32)
    hessian, between = correlated(rng, d), correlated(rng, rows)
    right = factor(hessian, np.full(d, 0.01 * np.diag(hessian).mean()))
    return weight, hessian + np.diag(np.full(d, 0.01 * np.diag(hessian).mean())), between, right


def left_of(between):
    return factor(between, np.zeros(len(between)))


def loss(weight, values, a, s):
    error = values.astype(np.float64) - weight
    return float(np.sum((a @ error @ s) * error))


def gone_on(targets, s, codes, scales, size):
    """Descents on codes and scales in turn from where rows stand; `size` is each row's loss as it counts."""
    owner, _ = reference.groups(targets.shape[1], 16)
    zeros = np.full(scales.shape, 4)
    active = np.ones(len(targets), bool)
    for _ in range(3):
        values = reference.value(codes, scales[:, owner], zeros[:, owner])
        before = reference.loss(targets, values, s)
        moved, _, _ = reference.descend(targets, s, codes, scales, zeros, 3, 16, 30)
        codes = np.where(active[:, None], moved, codes)
        rescaled = reference.rescale(targets, s, codes, scales, zeros, 16, "float16", signed=True)
        scales = np.where(active[:, None], rescaled, scales)
        values = reference.value(codes, scales[:, owner], zeros[:, owner])
        gain = reference.loss(targets, values, s) - before
        active &= size + gain < size * (1 - 1e-3)
        size = size + gain
    return codes, scales, values


def twin(weight, s, a, right, passes):
    """The same rows in the same tiles, in NumPy, a tile begun by the plain solver; and how many rows change."""
    rows, d = weight.shape
    order = np.asarray(reference.conditional_order(a))
    ordered, target = a[np.ix_(order, order)], weight[order].astype(np.float64)
    upper = np.linalg.cholesky(ordered[::-1, ::-1])[::-1, ::-1]
    unit = upper / np.diag(upper)
    error, values, replaced = np.zeros((rows, d)), np.zeros((rows, d), np.float32), 0
    codes, scales = np.zeros((rows, d)), np.zeros((rows, -(-d // 16)))
    for b in range(0, rows, 8):
        e = min(rows, b + 8)
        shift = unit[:b, b:e].T @ error[:b]
        for i in range(e - b):
            shift[i] -= unit[b : b + i, b + i] @ shift[:i]
        solved = native.gptq_cd((target[b:e] - shift).astype(np.float32), right, SETTINGS, threads=1)
        codes[b:e], scales[b:e] = solved["codes"].astype(float) + 4, solved["scales"]
        values[b:e] = values_of(solved, 16, d)
        error[b:e] = values[b:e] - target[b:e]
    for _ in range(passes):
        before = replaced
        for b in range(0, rows, 32):
            e = min(rows, b + 32)
            pivots = np.diag(ordered)[b:e, None]
            pull = ordered[b:e] @ error
            size = reference.loss(np.zeros((e - b, d)), error[b:e], s)
            targets = target[b:e] - (pull / pivots - error[b:e])
            new = gone_on(targets, s, codes[b:e], scales[b:e], size)
            change = new[2] - target[b:e] - error[b:e]
            image = change @ s
            for i in range(e - b):
                if np.sum(image[i] * (2 * pull[i] + pivots[i] * change[i])) < 0:
                    replaced += 1
                    error[b + i] += change[i]
                    codes[b + i], scales[b + i], values[b + i] = (part[i] for part in new)
                    pull += np.outer(ordered[b:e, b + i], change[i])
        if replaced == before:
            break
    out = np.zeros_like(values)
    out[order] = values
    return out, replaced


@pytest.mark.parametrize(("rows", "d", "passes"), [(24, 32, 0), (24, 32, 2), (43, 40, 1), (5, 33, 3)])
def test_equals_the_twin_and_reports_the_true_loss(rows, d, passes):
    weight, s, a, right = made(rows, d, seed=rows)
    solved = native.coupled(weight, right, [left_of(a)], SETTINGS, passes=passes, threads=1)
    values = values_of(solved, 16, d)
    expected, replaced = twin(weight, s, a, right, passes)
    np.testing.assert_array_equal(values, expected)
    assert solved["n_replaced"] == replaced
    assert solved["coupled_settled"] == pytest.approx(loss(weight, values, a, s), rel=1e-9)
    assert solved["coupled_settled"] <= solved["coupled_swept"]
    assert (solved["n_replaced"] > 0) == (solved["coupled_settled"] < solved["coupled_swept"])


def test_is_better_than_rows_that_do_not_know_each_other():
    for seed in range(3):
        weight, s, a, right = made(32, 48, seed)
        alone = values_of(native.gptq_cd(weight, right, SETTINGS, threads=1), 16, 48)
        together = native.coupled(weight, right, [left_of(a)], SETTINGS, threads=1)
        assert loss(weight, values_of(together, 16, 48), a, s) < 0.9 * loss(weight, alone, a, s)


def test_without_coupling_it_is_gptq_cd():
    weight, _, _, right = made(20, 32)
    plain = native.gptq_cd(weight, right, SETTINGS, threads=1)
    for diagonal in (np.ones(20), np.linspace(1, 9, 20)):
        solved = native.coupled(weight, right, [left_of(np.diag(diagonal))], SETTINGS, passes=0, threads=1)
        np.testing.assert_array_equal(solved["codes"], plain["codes"])
        np.testing.assert_array_equal(solved["scales"], plain["scales"])


def test_near_the_optimum_of_all_codes():
    """Two rows of three columns at two bits and fixed scales: all 4096 choices against the solver's."""
    rng = np.random.default_rng(4)
    ratios = []
    for _ in range(12):
        weight = rng.normal(size=(2, 3)).astype(np.float32)
        s, a = correlated(rng, 3), np.array([[1.0, 0.8], [0.8, 1.0]])
        right = factor(s, np.zeros(3))
        grid = GRID | REST | {"bits": 2, "group_size": 3, "signed": False, "refit": False}
        solved = native.coupled(weight, right, [left_of(a)], core.cd_settings(**grid), passes=4, threads=1)
        values = values_of(solved, 3, 3)
        best = min(
            loss(weight, np.array(c).reshape(2, 3) * solved["scales"], a, s)
            for c in itertools.product(range(-2, 2), repeat=6)
        )
        assert loss(weight, values, a, s) >= best * (1 - 1e-6)
        ratios.append(loss(weight, values, a, s) / best)
    assert np.median(ratios) < 1.05


def test_blocks_are_solved_apart_and_threads_change_nothing():
    weight, _, a, right = made(40, 32)
    blocks = [a[:16, :16], a[16:, 16:]]
    lefts = [left_of(np.ascontiguousarray(b)) for b in blocks]
    one = native.coupled(weight, right, lefts, SETTINGS, threads=1)
    two = native.coupled(weight, right, lefts, SETTINGS, threads=2)
    np.testing.assert_array_equal(one["codes"], two["codes"])
    np.testing.assert_array_equal(one["scales"], two["scales"])
    for rows, left in ((slice(0, 16), lefts[0]), (slice(16, 40), lefts[1])):
        part = native.coupled(np.ascontiguousarray(weight[rows]), right, [left], SETTINGS, threads=1)
        np.testing.assert_array_equal(part["codes"], one["codes"][rows])


def test_refuses_blocks_that_do_not_add_up():
    weight, _, a, right = made(16, 32)
    with pytest.raises(ConfigError, match="A"):
        native.coupled(weight[:12], right, [left_of(a)], SETTINGS, threads=1)


def test_an_unstorable_scale_is_named_by_its_row_of_the_weight():
    weight, _, a, right = made(40, 32)
    lefts = [left_of(np.ascontiguousarray(b)) for b in (a[:16, :16], a[16:, 16:])]
    # Rows are solved tile by tile in an order of their own: neither must be seen in the message.
    for row in (3, 29, 39):
        large = weight.copy()
        large[row] = 1e9
        with pytest.raises(SolveError, match=rf"of row {row}, group 0 is infinite in float16"):
            native.coupled(large, right, lefts, SETTINGS, passes=0, threads=1)


def test_scaling_either_side_changes_no_code():
    weight, s, a, _ = made(16, 32)
    codes = [
        native.coupled(
            weight,
            factor(s * k, np.zeros(32)),
            [left_of(a * k * k)],
            SETTINGS,
            threads=1,
        )["codes"]
        for k in (1.0, 4.0, 0.25)
    ]
    np.testing.assert_array_equal(codes[0], codes[1])
    np.testing.assert_array_equal(codes[0], codes[2])
