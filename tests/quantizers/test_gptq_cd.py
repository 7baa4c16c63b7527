"""GPTQ with coordinate descent against its NumPy twin, brute force, and the laws it must keep."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import loopq._native as native
from loopq.errors import ConfigError, SolveError
from tests.support import core
from tests.support import gptq_cd_reference as twin
from tests.support.problems import correlated, solve, values_of


def solved(weight, hessian, *, mu=None, order="conditional", threads=1, **settings):
    """Solve with all stages unless told otherwise; S too."""
    d = len(hessian)
    mu = np.full(d, 0.01 * np.diag(hessian).mean()) if mu is None else mu
    factor = native.DampedFactor(hessian, mu, order=order, threads=threads)
    options = {
        "bits": 3,
        "group_size": 16,
        "symmetric": True,
        "signed": False,
        "scale_dtype": "float16",
        "beam": 1,
        "sweeps": 30,
        "rounds": 4,
        "refit": True,
    } | settings
    # The twin says 0 where one scale is for the whole row.
    options["group_size"] = options["group_size"] or -1
    result = native.gptq_cd(weight, factor, core.cd_settings(**options), threads=threads)
    return result, hessian + np.diag(mu), factor


CASES = [
    (24, 64, 3, 16, True, False),
    (17, 50, 2, 16, True, True),
    (9, 40, 4, 0, True, False),
    (13, 48, 3, 16, False, False),
    (8, 33, 2, 8, False, False),
]


@pytest.mark.parametrize(("rows", "d", "bits", "group", "symmetric", "signed"), CASES)
def test_every_stage_equals_the_twin(rows, d, bits, group, symmetric, signed):
    rng = np.random.default_rng(d)
    weight = rng.normal(size=(rows, d)).astype(np.float32)
    hessian = correlated(rng, d)
    grid = {"bits": bits, "group_size": group, "symmetric": symmetric, "signed": signed}
    result, s, _ = solved(weight, hessian, rounds=0, **grid)
    order = twin.conditional_order(s)
    w = weight.astype(np.float64)
    fitted = {"bits": bits, "group_size": group, "symmetric": symmetric, "scale_dtype": "float16"}
    scales, zeros = twin.fit_scales(w, twin.pivots(s, order), signed=signed, **fitted)
    np.testing.assert_array_equal(result["scales"], scales)
    codes, values = twin.sweep(w, s, order, scales, zeros, bits, group)
    np.testing.assert_array_equal(values_of(result, group, d), values)
    assert result["proxy_swept"] == pytest.approx(twin.loss(w, values, s).sum(), rel=1e-9)

    result, _, _ = solved(weight, hessian, rounds=1, refit=False, **grid)
    _, values, moves = twin.descend(w, s, codes, scales, zeros, bits, group, 30)
    assert result["n_moves"] == moves > 0
    np.testing.assert_array_equal(values_of(result, group, d), values)
    assert result["proxy_settled"] == pytest.approx(twin.loss(w, values, s).sum(), rel=1e-9)

    # Without descent on the codes the scales of GPTQ's codes: the core goes round them up to three times.
    result, _, _ = solved(weight, hessian, rounds=1, sweeps=0, **grid)
    owner, _ = twin.groups(d, group)
    losses = [twin.loss(w, twin.value(codes, scales[:, owner], zeros[:, owner]), s)]
    active = np.ones(rows, bool)
    for _ in range(3):
        rescaled = twin.rescale(w, s, codes, scales, zeros, group, "float16", signed)
        scales = np.where(active[:, None], rescaled, scales)
        losses.append(twin.loss(w, twin.value(codes, scales[:, owner], zeros[:, owner]), s))
        active &= losses[-1] < losses[-2] * (1 - 1e-3)
    np.testing.assert_array_equal(result["scales"], scales)
    assert result["proxy_settled"] == pytest.approx(losses[-1].sum(), rel=1e-9)

    # A second start is GPTQ from the scales of the first, and rows keep what is better.
    first, _, _ = solved(weight, hessian, rounds=1, **grid)
    again, _ = twin.sweep(w, s, order, first["scales"].astype(np.float64), zeros, bits, group)
    again, values, _ = twin.descend(w, s, again, first["scales"].astype(np.float64), zeros, bits, group, 30)
    second, _, _ = solved(weight, hessian, rounds=2, **grid)
    before = twin.loss(w, values_of(first, group, d).astype(np.float64), s)
    after = twin.loss(w, values_of(second, group, d).astype(np.float64), s)
    assert (after <= np.minimum(before, twin.loss(w, values, s)) * (1 + 1e-9)).all()


@pytest.mark.parametrize(("rows", "d", "bits", "group", "symmetric", "signed"), CASES)
def test_the_damped_proxy_falls_from_stage_to_stage(rows, d, bits, group, symmetric, signed):
    rng = np.random.default_rng(100 + d)
    weight, hessian = rng.normal(size=(rows, d)).astype(np.float32), correlated(rng, d)
    grid = {"bits": bits, "group_size": group, "symmetric": symmetric, "signed": signed}
    losses = []
    for rounds in (1, 2, 8):
        result, s, _ = solved(weight, hessian, rounds=rounds, **grid)
        stages = [result["proxy_swept"], result["proxy_settled"]]
        error = values_of(result, group, d) - weight.astype(np.float64)
        assert stages[-1] == pytest.approx(np.einsum("ij,jk,ik->", error, s, error), rel=1e-9)
        losses.append(stages[-1])
    assert losses == sorted(losses, reverse=True)
    assert losses[0] < stages[0], "the descents gained nothing on a correlated Hessian"


def test_no_single_code_can_be_improved_after_descent():
    rng = np.random.default_rng(0)
    weight, hessian = rng.normal(size=(6, 24)).astype(np.float32), correlated(rng, 24)
    result, s, _ = solved(weight, hessian, refit=False, rounds=1, sweeps=100)
    codes, scales = result["codes"], np.repeat(result["scales"].astype(np.float64), 16, axis=1)[:, :24]
    weight = weight.astype(np.float64)
    best = twin.loss(weight, codes * scales, s)
    for j, step in itertools.product(range(24), (-1, 1)):
        moved = np.clip(codes.astype(int) + step * np.eye(24, dtype=int)[j], -4, 3)
        assert (twin.loss(weight, moved * scales, s) >= best * (1 - 1e-12)).all()


@pytest.mark.parametrize(
    ("settings", "rows", "seed"), [({"rounds": 8}, 4, 3), ({"rounds": 0, "beam": 64}, 8, 13)], ids=["descent", "beam"]
)  # fmt: skip
def test_brute_force_optimum_is_near(settings, rows, seed):
    """On 6 columns, one group: the exact best codes for the scales found, by trying all of them. 64 paths are all that
    two codes a column make."""
    rng = np.random.default_rng(seed)
    ratio = []
    for trial in range(6):
        weight, hessian = rng.normal(size=(rows, 6)).astype(np.float32), correlated(rng, 6)
        result, s, _ = solved(weight, hessian, bits=2, group_size=0, **settings)
        every = np.array(list(itertools.product(range(-2, 2), repeat=6)), dtype=np.float64)
        weight, scales = weight.astype(np.float64), result["scales"].astype(np.float64)
        loss = twin.loss(weight, values_of(result, 0, 6).astype(np.float64), s)
        for row in range(rows):
            exact = twin.loss(np.repeat(weight[row : row + 1], len(every), 0), every * scales[row, 0], s)
            assert loss[row] >= exact.min() * (1 - 1e-6), f"trial {trial}: below the optimum"
            ratio.append(loss[row] / exact.min())
    if "beam" in settings:
        assert np.mean(np.array(ratio) < 1 + 1e-6) > 0.9
        assert np.max(ratio) < 1.2
    else:
        assert np.median(ratio) < 1.02
        assert np.mean(ratio) < 1.25


@pytest.mark.parametrize(("rows", "d", "bits", "group", "symmetric", "signed"), CASES)
@pytest.mark.parametrize("n_paths", [2, 5, 32])
def test_a_beam_search_is_the_twins(rows, d, bits, group, symmetric, signed, n_paths):
    """In single precision, where two paths that cost nearly the same can change places."""
    rng = np.random.default_rng(200 + d)
    weight, hessian = rng.normal(size=(rows, d)).astype(np.float32), correlated(rng, d)
    grid = {"bits": bits, "group_size": group, "symmetric": symmetric, "signed": signed}
    result, s, _ = solved(weight, hessian, rounds=0, beam=n_paths, **grid)
    order, scales = twin.conditional_order(s), result["scales"].astype(np.float64)
    middle = np.full(scales.shape, 2 ** (bits - 1))
    zeros = middle if symmetric else result["zeros"].astype(np.int64)
    w = weight.astype(np.float64)
    _, values = twin.beam(w, s, order, scales, zeros, bits, group, n_paths)
    got = values_of(result, group, d)
    assert (got == values).all(axis=1).mean() > 0.9
    assert twin.loss(w, got.astype(np.float64), s).sum() == pytest.approx(
        twin.loss(w, values, s).sum(), rel=1e-3
    )
    swept, _, _ = solved(weight, hessian, rounds=0, **grid)
    assert result["proxy_swept"] < swept["proxy_swept"]


def test_powers_of_two_change_no_path():
    """In a row, and in all of them: paths are counted in units of the row's scales."""
    rng = np.random.default_rng(14)
    weight, hessian = rng.normal(size=(9, 150)).astype(np.float32), correlated(rng, 150)
    settings = {"beam": 16, "scale_dtype": "float32", "group_size": 32}
    plain, _, _ = solved(weight, hessian, **settings)
    factors = 2.0 ** np.arange(-40, 50, 10)[:, None]
    scaled, _, _ = solved((weight * factors).astype(np.float32), hessian, **settings)
    np.testing.assert_array_equal(scaled["codes"], plain["codes"])
    np.testing.assert_array_equal(scaled["scales"], plain["scales"] * factors)


@pytest.mark.parametrize("beam", [1, 16])
def test_neither_neighbouring_rows_nor_threads_change_a_row(beam):
    rng = np.random.default_rng(7)
    weight, hessian = rng.normal(size=(21, 150)).astype(np.float32), correlated(rng, 150)
    plain, _, _ = solved(weight, hessian, beam=beam)
    order = rng.permutation(21)
    turned, _, _ = solved(weight[order], hessian, beam=beam)
    for key in ("codes", "scales"):
        np.testing.assert_array_equal(turned[key], plain[key][order])
        np.testing.assert_array_equal(solved(weight[:3], hessian, beam=beam)[0][key], plain[key][:3])
        np.testing.assert_array_equal(solved(weight, hessian, beam=beam, threads=2)[0][key], plain[key])


def test_scaling_the_hessian_changes_no_code():
    rng = np.random.default_rng(8)
    weight, hessian = rng.normal(size=(9, 40)).astype(np.float32), correlated(rng, 40)
    plain = solve("gptq-cd", weight, hessian, bits=3, group_size=16)
    for c in (2.0**-30, 4.0, 2.0**40):
        assert solve("gptq-cd", weight, c * hessian, bits=3, group_size=16).same_as(plain)


def test_identity_hessian_gives_rounding_with_refitted_scales():
    rng = np.random.default_rng(9)
    weight = rng.normal(size=(12, 64)).astype(np.float32)
    settings = {"bits": 3, "group_size": 16, "signed_scales": False}
    plain = solve("rtn", weight, None, bits=3, group_size=16, scale_search="mse")
    one_pass = solve("gptq-cd", weight, np.eye(64), rounds=0, **settings)
    assert one_pass.same_as(plain)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_beats_gptq_and_negative_scales_help(bits):
    rng = np.random.default_rng(10)
    weight, hessian = rng.normal(size=(32, 96)).astype(np.float32), correlated(rng, 96)

    def loss(method, **more):
        layer = solve(method, weight, hessian, bits=bits, group_size=32, **more)
        error = layer.dequantize() - weight
        return np.trace(error @ hessian @ error.T), layer

    gptq, _ = loss("gptq")
    positive, one = loss("gptq-cd", signed_scales=False)
    signed, two = loss("gptq-cd")
    assert positive < gptq
    assert (one.scales > 0).all()
    assert two.n_bytes == one.n_bytes
    if bits < 4:
        assert signed < positive
        assert (two.scales < 0).any()


def test_zero_channels_zero_rows_and_settings_that_do_not_exist():
    rng = np.random.default_rng(11)
    weight, hessian = rng.normal(size=(5, 20)).astype(np.float32), correlated(rng, 20)
    weight[2] = 0
    hessian[7] = hessian[:, 7] = 0
    layer = solve("gptq-cd", weight, hessian, bits=4, group_size=-1, damping_kind="diagonal")
    np.testing.assert_array_equal(layer.dequantize()[2], np.zeros(20, np.float32))
    step = np.abs(layer.scales[:, 0])
    inside = np.abs(weight[:, 7]) <= 7 * step
    assert (np.abs(layer.dequantize()[:, 7] - weight[:, 7])[inside] <= 0.5001 * step[inside]).all()
    for bad in (
        {"order": "random"},
        {"rounds": -1},
        {"descent": -1},
        {"beam": 0},
        {"damping_kind": "x"},
    ):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            solve("gptq-cd", weight, hessian, **bad)
    for bad in ({"bits": 5}, {"group_size": -5}, {"scale_dtype": "int8"}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            solved(weight, correlated(rng, 20), **bad)
    with pytest.raises(SolveError, match="all zeros"):
        native.DampedFactor(np.zeros((3, 3)), np.zeros(3))
    with pytest.raises(SolveError, match="column"):
        native.DampedFactor(np.ones((3, 3)), np.zeros(3))
    with pytest.raises(ConfigError, match="mu"):
        native.DampedFactor(np.eye(3), np.zeros(2))
    with pytest.raises(SolveError, match="none were collected"):
        solve("gptq-cd", weight, None)
