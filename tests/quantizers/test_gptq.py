"""The core's GPTQ against the published algorithm in NumPy float64, on random and on collected Hessians."""

from __future__ import annotations

import numpy as np
import pytest

import loopq
from loopq.errors import ConfigError, SolveError
from loopq.systems.declare import parameter_of
from tests.support.gptq_reference import gptq
from tests.support.problems import correlated, solve
from tests.support.runs import run_of


def assert_same_codes(layer, codes, scale):
    """Equal codes; rows may differ only after a tie that rounding error decides, and those are rare."""
    differing = (layer.codes != codes).any(axis=1)
    assert differing.mean() <= 0.01, f"{differing.sum()} of {len(differing)} rows differ"
    # A scale taken from compensated weights may fall on the other side of its rounding once in a while.
    close = np.isclose(layer.scales, scale, rtol=2.0**-22, atol=0)
    assert close[~differing].mean() >= 0.99


@pytest.mark.parametrize(
    ("rows", "d", "bits", "group_size"),
    [
        (24, 64, 4, 32), (17, 100, 3, 32), (8, 33, 2, 16), (16, 160, 4, 128), (9, 96, 8, -1), (32, 512, 4, 128),
        (20, 200, 3, -1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("scales", ["group", "static"])
@pytest.mark.parametrize("scale_dtype", ["float32", "float16"])
def test_codes_equal_the_reference(rows, d, bits, group_size, scales, scale_dtype):
    rng = np.random.default_rng(d + bits)
    weight = rng.normal(size=(rows, d)).astype(np.float32)
    hessian = correlated(rng, d)
    settings = {
        "bits": bits,
        "group_size": group_size,
        "damping": 0.01,
        "scales": scales,
        "scale_dtype": scale_dtype,
    }
    layer = solve("gptq", weight, hessian, **settings)
    codes, scale, _ = gptq(weight, hessian, **settings)
    assert_same_codes(layer, codes, scale)


def test_asymmetric_codes_equal_the_reference():
    rng = np.random.default_rng(0)
    weight = (rng.normal(size=(16, 96)) + 0.7).astype(np.float32)
    hessian = correlated(rng, 96)
    settings = {"bits": 4, "group_size": 32, "damping": 0.01, "symmetric": False, "scale_dtype": "float32"}
    layer = solve("gptq", weight, hessian, **settings)
    codes, scale, zero = gptq(weight, hessian, **settings)
    assert_same_codes(layer, codes, scale)
    np.testing.assert_array_equal(layer.zeros, zero)


def test_codes_equal_the_reference_on_collected_hessians(tiny, tokens):
    run = run_of(tiny, tokens)
    sums = run.sums()
    sums.run_pass(list(sums.steps))
    for p in run.job.selection.observed:
        weight = parameter_of(tiny.system.model, p).detach().numpy()
        hessian = sums.accumulators[run.job.selection.input_groups[p.name]].matrix()
        layer = solve("gptq", weight, hessian, bits=3, group_size=20, damping=0.01, scale_dtype="float32")
        codes, scale, _ = gptq(weight, hessian, bits=3, group_size=20, damping=0.01)
        assert_same_codes(layer, codes, scale)


@pytest.mark.parametrize("group_size", [-1, 16, 24])
def test_gptq_with_identity_hessian_is_rtn(group_size):
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(12, 72)).astype(np.float32)
    for c in (1.0, 3e-5, 7e8):
        settings = {"bits": 4, "group_size": group_size}
        assert solve("gptq", weight, c * np.eye(72), **settings).same_as(
            solve("rtn", weight, None, **settings)
        )


def test_scaling_the_hessian_changes_no_code():
    rng = np.random.default_rng(2)
    weight, hessian = rng.normal(size=(12, 80)).astype(np.float32), correlated(rng, 80)
    plain = solve("gptq", weight, hessian, bits=3, group_size=32)
    for c in (2.0**-20, 2.0, 2.0**30):
        assert solve("gptq", weight, c * hessian, bits=3, group_size=32).same_as(plain)
    assert np.array_equal(solve("gptq", weight, 2 / 137 * hessian, bits=3, group_size=32).codes, plain.codes)


def test_block_size_and_threads_change_no_code():
    rng = np.random.default_rng(3)
    weight, hessian = rng.normal(size=(40, 150)).astype(np.float32), correlated(rng, 150)
    settings = {"bits": 3, "group_size": 32}
    plain = solve("gptq", weight, hessian, threads=1, **settings)
    for block in (1, 7, 32, 100, 1000):
        for threads in (1, 2):
            other = solve("gptq", weight, hessian, threads=threads, block_size=block, **settings)
            assert other.same_as(plain)


def test_permuting_rows_permutes_the_result():
    rng = np.random.default_rng(4)
    weight, hessian = rng.normal(size=(10, 64)).astype(np.float32), correlated(rng, 64)
    order = rng.permutation(10)
    plain = solve("gptq", weight, hessian, bits=4, group_size=16)
    assert np.array_equal(
        solve("gptq", weight[order], hessian, bits=4, group_size=16).codes, plain.codes[order]
    )


def test_gptq_lowers_the_proxy():
    rng = np.random.default_rng(5)
    for d in (32, 128):
        weight, hessian = rng.normal(size=(24, d)).astype(np.float32), correlated(rng, d)
        loss = {}
        for method in ("rtn", "gptq"):
            error = solve(method, weight, hessian, bits=3, group_size=32).dequantize() - weight
            loss[method] = np.trace(error @ hessian @ error.T)
        assert loss["gptq"] < loss["rtn"]


def test_undamped_singular_hessian_is_an_error_with_advice():
    rng = np.random.default_rng(6)
    x = rng.normal(size=(5, 20))
    with pytest.raises(SolveError, match=r"layer layer\.weight: .*damping"):
        solve(
            "gptq", rng.normal(size=(4, 20)).astype(np.float32), x.T @ x, damping=0.0, bits=4, group_size=-1
        )


def test_gptq_without_activations_is_an_error():
    with pytest.raises(SolveError, match="needs the layer's activations"):
        solve("gptq", np.ones((2, 4), np.float32), None)


def test_columns_in_the_order_of_their_energy_need_static_scales(tiny_folder, tokens, tmp_path):
    with pytest.raises(ConfigError, match="act_order needs static scales"):
        solve("gptq", np.ones((2, 4), np.float32), np.eye(4), act_order=True)
    out = tmp_path / "ordered"
    result = loopq.quantize(
        tiny_folder, tokens, out=out, method="gptq", group_size=16, scales="static", act_order=True
    )
    plain = loopq.quantize(tiny_folder, tokens, method="gptq", group_size=16, scales="static")
    assert any(not x.same_as(plain.layers[n]) for n, x in result.layers.items())
    assert (out / "loopq.json").is_file()


@pytest.mark.parametrize(
    ("field", "value"),
    [("scales", "best"), ("scale_search", "l1"), ("precision", "float16"), ("block_size", 0)],
)
def test_settings_that_do_not_exist(field, value):
    with pytest.raises(ConfigError, match=field):
        solve("gptq", np.ones((2, 4), np.float32), np.eye(4), **{field: value})
