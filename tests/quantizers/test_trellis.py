"""Codes on a trellis: against the formula of the format, brute force, and the laws the solver must keep."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

import loopq
import loopq._native as native
from loopq.errors import CheckpointError, ConfigError, SolveError
from loopq.formats import native as native_format
from loopq.layers.grids import even
from loopq.layers.grids.integer import Integer
from loopq.layers.grids.trellis import OnTrellis
from loopq.layers.layer import LayerSettings, QuantizedLayer
from loopq.layers.reader import TensorReader
from loopq.quantizers.config import LayerConfig
from loopq.quantizers.grid import GridSettings
from loopq.storage.schema import checked
from tests.support import core
from tests.support.problems import correlated, solve

CODE = {"group_size": 16, "scale_dtype": "float16"}


def value(state):
    """docs/formats/trellis.md."""
    mixed = (34038481 * state + 76625530) % 2**32
    return (sum(mixed >> 8 * i & 255 for i in range(4)) - 510) / 128


def decoded(codes, scales, bits, state_bits, stream_rows, group):
    """The weight, one entry after the other."""
    rows, columns = codes.shape
    out = np.zeros((rows, columns), np.float32)
    for first in range(0, rows, stream_rows):
        n = min(stream_rows, rows - first)
        for i, j in itertools.product(range(n), range(columns)):
            state = 0
            for back in range(-(-state_bits // bits) - 1, -1, -1):
                code = int(codes[first + (i - back) % n, j]) + 2 ** (bits - 1)
                state = (state << bits | code) % 2**state_bits
            out[first + i, j] = np.float32(value(state)) * scales[first + i, j // group]
    return out


def made(rows, d, seed=0):
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(rows, d)).astype(np.float32)
    hessian, between = correlated(rng, d), correlated(rng, rows)
    mu = np.full(d, 0.01 * np.diag(hessian).mean())
    return weight, native.DampedFactor(hessian, mu, order="conditional"), hessian + np.diag(mu), between


def left_of(between):
    return native.DampedFactor(np.ascontiguousarray(between), np.zeros(len(between)), order="natural")


def form(error, a, s):
    return float(np.sum((a @ error @ s) * error))


def test_the_example_of_the_format():
    codes = np.array([[1], [2], [3]], np.uint8)
    values = core.decode(
        codes, np.ones((3, 1), np.float32), bits=2, group_size=1, state_bits=4, stream_rows=512
    )
    np.testing.assert_array_equal(values[:, 0], np.float32([value(13), value(6), value(11)]))
    assert values[0, 0] == -157 / 128


@pytest.mark.parametrize(
    ("bits", "state_bits", "stream_rows"), [(2, 10, 512), (3, 7, 8), (4, 16, 5), (2, 4, 3)]
)
def test_decodes_as_the_format_says(bits, state_bits, stream_rows):
    rng = np.random.default_rng(bits)
    codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (21, 9)).astype(np.int8)
    scales = rng.normal(size=(21, 3)).astype(np.float16).astype(np.float32)
    values = core.decode(
        codes, scales, bits=bits, group_size=4, state_bits=state_bits, stream_rows=stream_rows
    )
    np.testing.assert_array_equal(values, decoded(codes, scales, bits, state_bits, stream_rows, 4))


@pytest.mark.parametrize(("rows", "d", "bits"), [(40, 32, 2), (33, 21, 3), (12, 17, 4), (3, 8, 2), (1, 5, 3)])
def test_reports_the_true_loss_and_solved_scales_lower_it(rows, d, bits):
    weight, right, s, a = made(rows, d)
    solved = core.trellis(weight, right, [left_of(a)], bits=bits, state_bits=bits + 5, **CODE)
    values = decoded(solved["codes"], solved["scales"], bits, bits + 5, rows, 16)
    assert solved["coupled_settled"] == pytest.approx(form(values - weight.astype(float), a, s), rel=1e-6)
    assert solved["coupled_settled"] <= solved["coupled_swept"] * (1 + 1e-9)


def states_of_all(rows, bits, state_bits):
    """States of every stream, shape (streams, rows)."""
    streams = np.array(list(itertools.product(range(2**bits), repeat=rows)))
    states = np.zeros_like(streams)
    for back in range(-(-state_bits // bits) - 1, -1, -1):
        states = (states << bits | np.roll(streams, back, axis=1)) % 2**state_bits
    return states


def over_the_best_stream(rows, coupled):
    """The loss of one column over that of the best of all streams, for twenty weights."""
    values = np.array([value(x) for x in range(64)])[states_of_all(rows, 2, 6)]
    ratios = []
    for seed in range(20):
        weight, right, s, a = made(rows, 1, seed)
        a = a if coupled else np.diag(np.diag(a))
        solved = core.trellis(weight, right, [left_of(a)], bits=2, state_bits=6, **CODE)
        # The first scale of two bits, before scales are solved for.
        scales = (0.86 * np.abs(weight[:, 0].astype(float))).astype(np.float16).astype(float)
        errors = values * scales - weight[:, 0]
        best = np.einsum("ni,ij,nj->n", errors, a, errors).min() * s[0, 0]
        ratios.append(solved["coupled_swept"] / best)
    return np.array(ratios)


def test_one_column_is_near_the_best_of_all_streams():
    """Two rows do not fill a state: all streams are tried. Seven are searched, exactly but for the seam if apart."""
    assert np.allclose(over_the_best_stream(2, coupled=True), 1)
    apart = np.sort(over_the_best_stream(7, coupled=False))
    assert np.allclose(apart[:16], 1, atol=1e-3)
    assert apart.max() < 1.5
    ratios = over_the_best_stream(7, coupled=True)
    assert ratios.min() > 1 - 1e-6
    assert np.median(ratios) < 2


def neighbours(n, seed, share):
    """A metric that couples neighbours."""
    x = np.random.default_rng(seed).normal(size=(4 * n, n))
    x[:, 1:] += share * x[:, :-1]
    return x.T @ x


@pytest.mark.parametrize(("bits", "most"), [(2, 0.7), (3, 0.7), (4, 0.7)])
def test_loss_is_below_the_plain_grids_and_falls_with_coupling(bits, most):
    weight, s, a = made(96, 64)[0], neighbours(64, 1, 0.5), neighbours(96, 2, 0.6)
    right = native.DampedFactor(s, np.zeros(64), order="conditional")
    code = {"group_size": 64, "scale_dtype": "float16", "bits": bits}
    losses = {}
    for name, between in (("coupled", a), ("apart", np.diag(np.diag(a)))):
        solved = core.trellis(weight, right, [left_of(between)], state_bits=10, **code)
        values = decoded(solved["codes"], solved["scales"], bits, 10, 96, 64)
        losses[name] = form(values - weight.astype(float), a, s)
    left = native.DampedFactor(a, np.zeros(96), order="conditional")
    assert losses["coupled"] < 0.9 * losses["apart"]
    # One path, and as many as gptq-cd keeps in this metric.
    for beam, share in ((1, most), (64, 0.8)):
        settings = core.cd_settings(
            symmetric=True, signed=True, beam=beam, sweeps=30, rounds=4, refit=True, **code
        )
        assert losses["coupled"] < share * native.coupled(weight, right, [left], settings)["coupled_settled"]


def test_blocks_are_solved_apart_and_threads_change_nothing():
    weight, right, _, a = made(40, 32)
    lefts = [left_of(a[:16, :16]), left_of(a[16:, 16:])]
    one, two = (core.trellis(weight, right, lefts, bits=3, state_bits=8, threads=n, **CODE) for n in (1, 2))
    part = core.trellis(np.ascontiguousarray(weight[16:]), right, lefts[1:], bits=3, state_bits=8, **CODE)
    for key in ("codes", "scales"):
        np.testing.assert_array_equal(one[key], two[key])
        np.testing.assert_array_equal(one[key][16:], part[key])


def test_scaling_either_side_changes_no_code():
    weight, _, s, a = made(24, 32)
    results = []
    for k in (1.0, 4.0, 0.25):
        right = native.DampedFactor(s * k, np.zeros(32), order="conditional")
        results.append(core.trellis(weight, right, [left_of(a * k)], bits=2, state_bits=8, **CODE)["codes"])
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_rows_of_zeros_are_coded_and_what_cannot_be_is_refused():
    weight, right, _, a = made(16, 32)
    quiet = weight.copy()
    quiet[5] = 0
    solved = core.trellis(quiet, right, [left_of(a)], bits=2, state_bits=8, **CODE)
    assert np.isfinite(solved["scales"]).all()
    assert (solved["scales"] != 0).all()
    for change in ({"bits": 8}, {"state_bits": 3}, {"state_bits": 17}, {"scale_dtype": "int8"}):
        with pytest.raises(ConfigError):
            core.trellis(weight, right, [left_of(a)], **{"bits": 2, "state_bits": 8, **CODE, **change})
    with pytest.raises(ConfigError, match="natural"):
        ordered = native.DampedFactor(a, np.zeros(16), order="conditional")
        core.trellis(weight, right, [ordered], bits=2, state_bits=8, **CODE)
    with pytest.raises(ConfigError, match="A"):
        core.trellis(weight[:12], right, [left_of(a)], bits=2, state_bits=8, **CODE)
    weight[7, 20] = 1e9
    with pytest.raises(SolveError, match="row 7, group 1 is infinite in float16"):
        core.trellis(weight, right, [left_of(a)], bits=2, state_bits=8, **CODE)


def test_the_method_refuses_grids_without_a_trellis():
    for bad in ({"bits": 8}, {"symmetric": False}, {"bits": 4, "state_bits": 5}, {"state_bits": 20}):
        with pytest.raises(ConfigError):
            LayerConfig.of(method="trellis", **bad)


def over_the_plain_grid(rows, beam):
    """The loss of weights of few outputs over that of gptq-cd in the same metric, on the geometric mean."""
    ratios = []
    for seed in range(6):
        weight = np.random.default_rng(seed).normal(size=(rows, 64)).astype(np.float32)
        s, a = neighbours(64, seed + 10, 0.5), neighbours(rows, seed + 20, 0.6)
        right = native.DampedFactor(s, np.zeros(64), order="conditional")
        code = {"group_size": 64, "scale_dtype": "float16", "bits": 2 + seed % 3}
        solved = core.trellis(weight, right, [left_of(a)], state_bits=10, **code)
        settings = core.cd_settings(
            symmetric=True, signed=True, beam=beam, sweeps=30, rounds=4, refit=True, **code
        )
        left = native.DampedFactor(a, np.zeros(rows), order="conditional")
        plain = native.coupled(weight, right, [left], settings)
        ratios.append(solved["coupled_settled"] / plain["coupled_settled"])
    return np.exp(np.mean(np.log(ratios)))


def test_streams_gain_with_sixteen_outputs_and_lose_with_eight():
    assert over_the_plain_grid(16, 64) < 0.8
    assert over_the_plain_grid(8, 1) > 1.2


def test_few_outputs_are_left_to_the_plain_grid():
    rng = np.random.default_rng(0)
    weight, hessian = rng.normal(size=(15, 16)).astype(np.float32), correlated(rng, 16)
    layer = solve("trellis", weight, hessian, bits=2)
    assert isinstance(layer.grid, Integer)
    assert layer.report["method_done"] == "gptq-cd"
    assert layer.same_as(solve("gptq-cd", weight, hessian, bits=2))


def test_what_a_layer_says_of_its_streams():
    rng = np.random.default_rng(0)
    layer = solve("trellis", rng.normal(size=(64, 16)).astype(np.float32), correlated(rng, 16), bits=2)
    assert isinstance(layer, QuantizedLayer)
    assert layer.grid.trellis.stream_rows == 512
    assert layer.n_bytes == 64 * 4 + 64 * 2
    assert not layer.same_as(dataclasses.replace(layer, grid=Integer(2, 128, "float16")))


def test_a_checkpoint_gives_the_model_back_to_loopq_alone(tiny_folder, tokens, tmp_path):
    run = loopq.quantize(
        tiny_folder, tokens, method="trellis", bits=3, group_size=8, out=tmp_path / "q", threads=1
    )
    again = native_format.read(tmp_path / "q")
    assert {n: layer.same_as(again.layers[n]) for n, layer in run.layers.items()} == dict.fromkeys(
        run.layers, True
    )
    name, layer = next((n, x) for n, x in again.layers.items() if isinstance(x.grid, OnTrellis))
    rows = layer.shape[0]
    expected = decoded(layer.codes, layer.scales, 3, layer.grid.trellis.state_bits, min(rows, 512), 8)
    np.testing.assert_array_equal(layer.dequantize(), expected)
    with pytest.raises(CheckpointError, match=r"on a trellis.* compressed-tensors cannot hold"):
        loopq.export(tmp_path / "q", tmp_path / "ct", "compressed-tensors")
    assert name in run.layers


@pytest.mark.parametrize("change", [{"symmetric": False}, {"bits": 8}, {"state_bits": 4}])
def test_an_index_that_puts_other_grids_on_a_trellis_is_refused(change):
    rng = np.random.default_rng(0)
    layer = solve("trellis", rng.normal(size=(64, 16)).astype(np.float32), correlated(rng, 16), bits=3)
    described = layer.settings() | {k: v for k, v in change.items() if k != "state_bits"}
    if "state_bits" in change:
        described["trellis"] = described["trellis"] | change
    # Tensors that fit the altered grid, so that nothing else is wrong.
    grid = even(
        bits=described["bits"], group_size=128, symmetric=described["symmetric"], scale_dtype="float16"
    )
    zeros = None if grid.symmetric else np.zeros((64, 1), np.uint8)
    other = QuantizedLayer(layer.name, grid, np.zeros((64, 16), grid.dtype), layer.scales, zeros)
    settings = checked(LayerSettings, described, "index")
    with pytest.raises(
        CheckpointError,
        match=r"index: layer layer\.weight: grid trellis: (symmetric is False|Trellis.* for \d bits)",
    ):
        QuantizedLayer.from_tensors(settings, TensorReader("index", other.tensors()), {})


def test_the_method_gives_its_grid_before_a_run():
    method = LayerConfig.of(method="trellis", bits=3).method
    grid = method.make_grid(GridSettings(3, 32))
    assert (type(grid), grid.bits, grid.group_size) == (OnTrellis, 3, 32)
    assert LayerConfig.of(method="rtn").method.make_grid(GridSettings(3, 32)) == GridSettings(3, 32).make()
