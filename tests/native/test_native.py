"""The binding on NumPy arrays: against plain NumPy twins, golden vectors, and the interpreter's own rules."""

from __future__ import annotations

import json
import signal
import struct
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopq import _native, errors
from tests.support import core
from tests.support.gptq_reference import gptq
from tests.support.marks import slow_unless

GOLDEN = Path(__file__).parents[1] / "golden"


def correlated(n: int, dim: int, seed: int = 0) -> np.ndarray:
    """Rows with neighbouring columns correlated and a common part."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, dim))
    x[:, 1:] += 0.8 * x[:, :-1]
    return (x + rng.standard_normal((n, 1))).astype(np.float32)


def summed(x: np.ndarray) -> _native.HessianAccumulator:
    """A finished accumulator over one step."""
    hessian = _native.HessianAccumulator(x.shape[1], [0], per_step=True)
    hessian.update(0, x)
    hessian.finish()
    return hessian


def factor(h: np.ndarray, damping: float, **options: Any) -> _native.DampedFactor:
    """A Hessian with a fraction of its mean diagonal as damping, factored."""
    return _native.DampedFactor(h, np.full(len(h), damping * np.mean(np.diag(h))), **options)


def test_golden_packing() -> None:
    golden = json.loads((GOLDEN / "packing.json").read_text())
    for case in golden["dense"]:
        codes = np.array([case["codes"]], np.uint8)
        words = np.array([case["words"]], np.uint32).view(np.int32)
        assert np.array_equal(_native.pack_dense(codes, case["bits"]), words)
        assert np.array_equal(_native.unpack_dense(words, case["bits"], codes.shape[1]), codes)
    codes = np.array(golden["marlin"]["codes"], np.uint8)
    words, _ = _native.marlin_pack(codes, np.ones((codes.shape[0], 1), np.float32))
    assert np.array_equal(words.ravel().view(np.uint32), np.array(golden["marlin"]["words"], np.uint32))


@pytest.mark.parametrize(("k", "n", "groups"), [(128, 256, 1), (256, 256, 2), (512, 768, 4), (384, 512, 1)])
def test_marlin_follows_the_closed_formulas(k: int, n: int, groups: int) -> None:
    """Those of the core's module, entry by entry."""
    rng = np.random.default_rng(k)
    codes, scales = rng.integers(0, 16, (n, k)).astype(np.uint8), rng.random((n, groups)).astype(np.float32)
    rows, columns = np.meshgrid(np.arange(n), np.arange(k), indexing="ij")
    word = (columns >> 4) * 2 * n + (rows >> 6) * 128 + (4 * (rows & 7) + ((columns & 7) >> 1)) * 4
    word += (rows >> 4) & 3
    nibble = 2 * ((rows >> 3) & 1) + ((columns >> 3) & 1) + 4 * (columns & 1)
    words = np.zeros(k // 16 * 2 * n, np.uint32)
    np.bitwise_or.at(words, word.ravel(), (codes.astype(np.uint32) << (4 * nibble).astype(np.uint32)).ravel())
    out = np.arange(n)
    place = (out & ~31) + 8 * ((out & 7) >> 1) + 2 * ((out & 31) >> 3) + (out & 1)
    if groups > 1:
        place = (out & ~63) + 8 * (out & 7) + ((out & 63) >> 3)
    packed, stored = _native.marlin_pack(codes, scales)
    assert np.array_equal(packed.view(np.uint32), words.reshape(k // 16, 2 * n))
    assert np.array_equal(stored[:, place], scales.T)
    again = _native.marlin_unpack(packed, stored)
    assert np.array_equal(again[0], codes.astype(np.int16) - 8)
    assert np.array_equal(again[1], scales)


def test_golden_hessian() -> None:
    golden = json.loads((GOLDEN / "hessian.json").read_text())
    rows = (np.array(golden["rows"]) / golden["denominator"]).astype(np.float32)
    for given_rows in (rows, rows.astype(np.float16), (rows.view(np.uint32) >> 16).astype(np.uint16)):
        state = summed(given_rows).state()
        assert state["hi"][0].tolist() == golden["hi"]
        assert state["lo"][0].tolist() == golden["lo"]
        assert state["n_rows"] == [len(rows)]


def write_rows(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a safetensors file by hand; uint16 stands for bfloat16 bits."""
    names = {"float32": "F32", "float16": "F16", "uint16": "BF16", "float64": "F64"}
    header, at = {}, 0
    for name, array in tensors.items():
        span = [at, at + array.nbytes]
        header[name] = {"dtype": names[array.dtype.name], "shape": list(array.shape), "data_offsets": span}
        at += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in tensors.values()))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_file_gives_the_bits_of_the_array(tmp_path: Path, dtype: str) -> None:
    x = correlated(1300, 40)
    rows = {"F32": x, "F16": x.astype(np.float16), "BF16": (x.view(np.uint32) >> 16).astype(np.uint16)}[dtype]
    # A tensor of three values before the rows: these begin at an odd place.
    parts = {f"rows/{start}": rows[start : start + 500] for start in range(0, 1300, 500)}
    write_rows(tmp_path / "rows", {"odd": np.zeros(3, np.float16)} | parts)
    hessian = _native.HessianAccumulator(40, [0], per_step=True)
    for name in parts:
        hessian.update_file(0, tmp_path / "rows", name)
    hessian.finish()
    assert np.array_equal(hessian.matrix(), summed(rows).matrix())


def test_files_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    path, rows = tmp_path / "00000.safetensors", correlated(6, 4)
    hessian = _native.HessianAccumulator(4, [0], per_step=True)

    def refused(error: type[Exception], match: str, name: str = "a/0") -> None:
        with pytest.raises(error, match=rf"00000\.safetensors.*{match}"):
            hessian.update_file(0, path, name)

    refused(errors.DumpError, "cannot read|No such file")
    for content in (b"", b"\x02\0\0\0\0\0\0\0[]", b"\xff" * 40):
        path.write_bytes(content)
        refused(errors.DumpError, "not a whole safetensors file")
    write_rows(path, {"a/0": rows, "b": rows.astype(np.float64), "c": rows[:, :3], "d": rows.ravel()})
    refused(errors.DumpError, 'no tensor "x"', "x")
    for name, what in (("b", "F64"), ("c", r"\[6, 3\]"), ("d", r"\[24\]")):
        refused(errors.DumpError, rf'tensor "{name}" is .*{what}.* rows must be .*\[rows, 4\]', name)
    whole = path.read_bytes()
    for cut in (whole[:-1], whole + b"\0", whole[:60]):
        path.write_bytes(cut)
        refused(errors.DumpError, "not a whole safetensors file")
    rows[2, 1] = np.nan
    write_rows(path, {"a/0": rows})
    refused(errors.NonFiniteError, 'tensor "a/0": .*NaN at step 0, row 2.*column 1')
    assert hessian.n_rows(0) == 0


@settings(max_examples=15, deadline=None)
@given(
    st.integers(2, 70),
    st.integers(1, 60),
    st.sampled_from([2, 3, 4, 8]),
    st.integers(1, 80),
    st.integers(0, 99),
)
def test_codes_are_those_of_plain_gptq(dim: int, m: int, bits: int, group: int, seed: int) -> None:
    h = summed(correlated(3 * dim, dim, seed)).matrix()
    w = np.random.default_rng(seed).standard_normal((m, dim)).astype(np.float32)
    got = core.gptq(w, factor(h, 0.01), bits=bits, group_size=group, threads=1)
    codes, scales, _ = gptq(w, h, bits=bits, group_size=group, damping=0.01)
    same = (got["codes"] == codes).all(1)
    assert same.mean() >= 0.9, "rows may differ only by ties"
    # A weight that nearly cancels leaves a small scale, as exact as the weights that it came from.
    np.testing.assert_allclose(
        got["scales"][same], scales[same], rtol=2e-7, atol=2e-7 * scales.max(initial=0.0)
    )


def test_report_and_shared_factor() -> None:
    x = correlated(800, 96)
    x[:, 17] = 0
    h = summed(x).matrix()
    w = np.random.default_rng(1).standard_normal((30, 96)).astype(np.float32)
    mu = np.linspace(0.5, 1.5, 96) * 0.05 * np.mean(np.diag(h))
    shared = _native.DampedFactor(h, mu)
    got = core.gptq(w, shared, bits=3, group_size=32)
    for rows in (w[:7], w[7:]):
        part = core.gptq(rows, shared, bits=3, group_size=32)
        assert np.array_equal(part["codes"], got["codes"][:7] if len(rows) == 7 else got["codes"][7:])
    hat = core.dequantize(got["codes"], got["scales"], None, 32)
    gap = hat.astype(np.float64) - w
    assert got["proxy"] == pytest.approx(np.trace(gap @ h @ gap.T), rel=1e-9)
    assert got["proxy_damped"] == pytest.approx(np.trace(gap @ (h + np.diag(mu)) @ gap.T), rel=1e-9)
    assert _native.proxy(w, hat, h) == pytest.approx(got["proxy"], rel=1e-9)
    assert (got["n_dead_columns"], got["damping_abs"]) == (1, mu.max())
    inverse = np.linalg.inv(h + np.diag(mu))
    assert 1 / got["max_pivot"] == pytest.approx(np.diag(np.linalg.cholesky(inverse)).min() ** 2)


def test_shift_is_the_target_of_least_squares() -> None:
    rng = np.random.default_rng(2)
    x, noisy = correlated(500, 40), correlated(500, 40, 1)
    h, cross = noisy.T.astype(float) @ noisy, (x - noisy).T.astype(float) @ noisy
    w, mu = rng.standard_normal((11, 40)).astype(np.float32), np.full(40, 3.0)
    expected = w @ (np.eye(40) + 0.7 * cross @ np.linalg.inv(h + np.diag(mu)))
    for order in ("natural", "diagonal", "conditional"):
        got = _native.DampedFactor(h, mu, order=order).shift(w, cross, 0.7)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(_native.DampedFactor(h, mu, order=order).shift(w, cross, 0.0), w)
    for wrong, match in ((cross[:, :39], "C: expected 40 x 40"), (np.full((40, 40), np.inf), "C holds inf")):
        with pytest.raises(errors.LoopqError, match=match):
            _native.DampedFactor(h, mu).shift(w, np.ascontiguousarray(wrong), 0.7)


def test_act_order_is_plain_gptq_on_permuted_columns() -> None:
    h = summed(correlated(800, 64)).matrix()
    w = np.random.default_rng(1).standard_normal((20, 64)).astype(np.float32)
    factored = factor(h, 0.01, order="diagonal")
    got = core.gptq(w, factored, bits=4, group_size=-1, scales="static")
    order = np.argsort(-np.diag(h), kind="stable")
    turned = np.ascontiguousarray(w[:, order]), h[np.ix_(order, order)]
    codes, _, _ = gptq(*turned, bits=4, group_size=-1, damping=0.01)
    assert np.array_equal(got["codes"][:, order], codes)
    with pytest.raises(errors.ConfigError, match="'static' where columns are reordered"):
        core.gptq(w, factored, bits=4, group_size=16)


def test_a_hessian_changed_after_its_factorization_is_noticed() -> None:
    h, w = np.eye(8) + 1, np.ones((3, 8), np.float32)
    settings = core.cd_settings(
        bits=4, group_size=8, symmetric=True, signed=False, scale_dtype="float32", beam=1, sweeps=1,
        rounds=1, refit=False,
    )  # fmt: skip
    early, late = factor(h, 0.01), factor(h, 0.01)
    before = _native.gptq_cd(w, early, settings)
    h[0, 1] = h[1, 0] = 0.5
    assert np.array_equal(_native.gptq_cd(w, early, settings)["codes"], before["codes"])
    with pytest.raises(errors.ConfigError, match="changed after it was factored"):
        _native.gptq_cd(w, late, settings)


def test_other_solvers_than_gptq_refuse_single_precision() -> None:
    single = factor(np.eye(8) + 1, 0.01, precision="float32")
    w = np.ones((3, 8), np.float32)
    assert core.gptq(w, single, bits=4, group_size=8)["codes"].shape == (3, 8)
    with pytest.raises(errors.ConfigError, match=r'precision = "float32" .* only gptq'):
        single.shift(w, np.zeros((8, 8)), 1.0)
    with pytest.raises(errors.ConfigError, match='precision = "float16"'):
        factor(np.eye(8), 0.01, precision="float16")


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_asymmetric_values_lie_on_their_grid(bits: int) -> None:
    rng = np.random.default_rng(3)
    w = (rng.standard_normal((9, 50)) + 0.4).astype(np.float32)
    got = core.rtn(w, bits=bits, group_size=16, symmetric=False, scale_dtype="float16")
    assert got["codes"].dtype == np.uint8
    assert got["codes"].max() <= 2**bits - 1
    assert np.array_equal(got["scales"].astype(np.float16).astype(np.float32), got["scales"])
    zeros, scales = got["zeros"].repeat(16, 1)[:, :50], got["scales"].repeat(16, 1)[:, :50]
    hat = core.dequantize(got["codes"], got["scales"], got["zeros"], 16)
    expected = (got["codes"].astype(np.float32) - zeros) * scales
    assert np.array_equal(hat, expected)
    assert np.all(np.abs(hat - w) <= 0.51 * scales + 1e-6)


def test_mse_scales_are_never_worse() -> None:
    w = np.random.default_rng(3).standard_normal((40, 96)).astype(np.float32)
    error = {}
    for search in ("max", "mse"):
        got = core.rtn(w, bits=3, group_size=32, scale_search=search)  # type: ignore[arg-type]
        gap = (core.dequantize(got["codes"], got["scales"], None, 32) - w).astype(np.float64)
        error[search] = (gap**2).reshape(40, 3, 32).sum(2)
    assert np.all(error["mse"] <= error["max"] * (1 + 1e-6))
    assert error["mse"].sum() < 0.9 * error["max"].sum()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_half_range_scales_use_every_code(bits: int) -> None:
    w = np.random.default_rng(3).standard_normal((40, 96)).astype(np.float32)
    got = core.rtn(w, bits=bits, group_size=32, scale_search="half-range")  # type: ignore[arg-type]
    largest = np.abs(w).reshape(40, 3, 32).max(2).astype(np.float64)
    assert np.array_equal(got["scales"], (largest / ((2**bits - 1) / 2)).astype(np.float32))
    assert (got["codes"].min(), got["codes"].max()) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    # An asymmetric grid reaches from the least to the largest weight either way.
    for search in ("max", "half-range"):
        assert np.array_equal(
            core.rtn(w, bits=bits, group_size=32, symmetric=False, scale_search=search)["codes"],
            core.rtn(w, bits=bits, group_size=32, symmetric=False)["codes"],
        )


def test_eigenvalues_are_those_of_lapack() -> None:
    h = summed(correlated(300, 120)).matrix()
    got, expected = _native.eigvalsh(h), np.linalg.eigvalsh(h)
    np.testing.assert_allclose(got, expected, atol=1e-12 * expected[-1])
    assert np.array_equal(_native.eigvalsh(h, threads=1), _native.eigvalsh(h, threads=2))


FRACTIONS = [0.5, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8]


@settings(max_examples=20, deadline=None)
@given(
    dim=st.integers(1, 300), rank=st.integers(1, 300), decades=st.floats(0, 9), seed=st.integers(0, 999),
    kind=st.sampled_from(["smooth", "flat", "spike", "dead columns", "scaled columns"]),
)  # fmt: skip
def test_eigenvalues_are_counted_as_lapack_counts_them(
    dim: int, rank: int, decades: float, seed: int, kind: str
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rank, dim)) * np.logspace(0, -decades / 2, rank)[:, None]
    x = x @ np.linalg.qr(rng.standard_normal((dim, dim)))[0]
    if kind == "flat":
        x = np.linalg.qr(rng.standard_normal((dim, dim)))[0]
    elif kind == "spike":
        x[0] *= 300
    elif kind == "dead columns":
        x[:, rng.random(dim) < 0.5] = 0
    elif kind == "scaled columns":
        x *= np.logspace(0, -4, dim)
    h = x.T @ x
    values = np.linalg.eigvalsh(h)
    largest, above = _native.count_above(h, FRACTIONS)
    assert largest == pytest.approx(values[-1], rel=1e-9)
    for fraction, count in zip(FRACTIONS, above, strict=True):
        # An eigenvalue within the rounding error of the bound may fall on either side.
        near = 1e-9 * values[-1]
        bound = fraction * values[-1]
        assert (values > bound + near).sum() <= count <= (values > bound - near).sum(), fraction
    assert _native.count_above(h, FRACTIONS, threads=1) == (largest, above)


@pytest.mark.parametrize("precision", [np.float32, np.float64])
def test_counts_of_matrices_that_no_order_factors(precision: type) -> None:
    # The bound equals the diagonal exactly, so every first pivot is zero. The eigenvalues are 2 and 0, three
    # times.
    h = np.kron(np.eye(3), np.ones((2, 2))).astype(precision)
    assert _native.count_above(h, [0.5, 0.25]) == (pytest.approx(2.0), [3, 3])
    assert _native.count_above(np.zeros((4, 4), precision), [0.5, 0.0]) == (0.0, [0, 0])
    assert _native.count_above(np.zeros((0, 0), precision), [0.5]) == (0.0, [0])
    assert _native.count_above(np.full((1, 1), 7, precision), [0.5]) == (7.0, [1])
    with pytest.raises(errors.ConfigError, match=r"largest eigenvalue = 1 .* below 1"):
        _native.count_above(h, [1.0])
    with pytest.raises(errors.NonFiniteError, match="row 0, column 1"):
        _native.count_above(np.array([[1, np.nan], [0, 1]], precision), [0.1])


def test_arrays_of_other_types_are_type_errors() -> None:
    hessian = _native.HessianAccumulator(4, [0], per_step=True)
    with pytest.raises(
        TypeError, match=r"rows must be .* float32, float16 or uint16 .*; got float64 of shape \(2, 4\)"
    ):
        hessian.update(0, np.zeros((2, 4)))
    with pytest.raises(errors.ConfigError, match=r"zero_offset = 8 .* uint8"):
        _native.pack_dense(np.zeros((1, 4), np.uint8), 4, 8)
    with pytest.raises(
        TypeError, match=r"codes must be a 2-dimensional array of int8 .*; got int64 of shape \(4,\)"
    ):
        _native.pack_dense(np.zeros(4, np.int64), 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"w must be a 2-dimensional array of float32; got .*list"):
        core.rtn([[1.0]], bits=4, group_size=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got >f4"):
        core.rtn(np.zeros((1, 4), ">f4"), bits=4, group_size=4)
    with pytest.raises(errors.ConfigError, match="square"):
        _native.eigvalsh(np.zeros((2, 3)))


def test_shapes_must_agree_without_rows_too() -> None:
    wide = factor(np.eye(129), 0.01)
    settings = core.cd_settings(
        bits=4, group_size=8, symmetric=True, signed=False, scale_dtype="float32", beam=1, sweeps=1, rounds=1,
        refit=False,
    )  # fmt: skip
    w = np.zeros((0, 1), np.float32)
    for call in (
        lambda: core.gptq(w, wide, bits=4, group_size=8),
        lambda: _native.gptq_cd(w, wide, settings),
        lambda: _native.coupled(w, wide, [], settings),
        lambda: _native.proxy(w, None, np.eye(129)),
        lambda: wide.shift(w, np.eye(129), 1.0),
    ):
        with pytest.raises(errors.ConfigError, match="columns of W: expected 129, those of H, got 1"):
            call()
    square = np.ones((3, 3), np.float32)
    with pytest.raises(errors.ConfigError, match="W\\^: expected 3 x 3, as W, got 9 x 1"):
        _native.proxy(square, square.reshape(9, 1), np.eye(3))
    with pytest.raises(errors.ConfigError, match="scales: expected 4 x 2, got 2 x 4"):
        core.dequantize(np.zeros((4, 6), np.int8), np.ones((2, 4), np.float32), None, 3)
    with pytest.raises(errors.ConfigError, match="scales: expected 64 x 0, got 5 x 0"):
        _native.marlin_pack(np.zeros((64, 16), np.uint8), np.ones((5, 0), np.float32))


def test_errors_are_loopqs_own() -> None:
    w = np.ones((2, 4), np.float32)
    with pytest.raises(errors.ConfigError, match="group_size = -2"):
        core.rtn(w, bits=4, group_size=-2)
    with pytest.raises(errors.SolveError, match="all zeros"):
        factor(np.zeros((4, 4)), 0.1)
    with pytest.raises(errors.NonFiniteError, match="row 1, column 2"):
        core.rtn(
            np.where(np.arange(8).reshape(2, 4) == 6, np.nan, w).astype(np.float32), bits=4, group_size=4
        )
    hessian = _native.HessianAccumulator(4, [0], per_step=True)
    hessian.finish()
    with pytest.raises(errors.ConfigError, match="the accumulator itself"):
        hessian.merge(hessian)


def test_memory_that_is_not_there_is_an_error_with_its_size() -> None:
    with pytest.raises(
        errors.OutOfMemoryError, match=r"no memory for the exact sums of a Hessian, \d{3,}\.\d GiB"
    ):
        _native.HessianAccumulator(10_000_000, [0], per_step=True)
    assert issubclass(errors.OutOfMemoryError, MemoryError)


#: One scale for each row, without groups.
CD = core.cd_settings(
    bits=3, group_size=-1, symmetric=True, signed=True, scale_dtype="float32", beam=1, sweeps=9, rounds=9, refit=True,
)  # fmt: skip


def prompt_in_a_loop() -> None:
    """Run a prompt of 256 tokens through an adapter, two thousand times."""
    runner = _native.CpuRunner(
        [(None, np.zeros(shape, np.float32), None, None) for shape in ((2, 512), (512, 1024))],
        [], [], [("keep", 0), *[("adapter", 1)] * 2000], 0, precision="fixed24", kept="float32",
    )  # fmt: skip
    x, logits = np.ones((256, 512), np.float32), np.zeros((1, 2), np.float32)
    runner.run(x, np.zeros((256, 2), np.float32), logits, threads=2)


@pytest.mark.parametrize(
    "work",
    slow_unless(
        lambda work: work in ("factor", "solve", "read"),
        ["factor", "solve", "gptq_cd", "coupled", "eigenvalues", "proxy", "prompt", "read"],
    ),
)
def test_ctrl_c_stops_within_a_second(work: str) -> None:
    dim = 3000
    h = np.eye(dim) + 1.0
    w = np.random.default_rng(0).standard_normal((4 * dim, dim), np.float32)
    factored = factor(h, 0.1)
    calls = {
        "factor": lambda: factor(h, 0.1, order="conditional", threads=1),
        "solve": lambda: core.gptq(w, factored, bits=4, group_size=128, threads=1),
        "gptq_cd": lambda: _native.gptq_cd(w, factored, CD, threads=1),
        "coupled": lambda: _native.coupled(w[:dim], factored, [factored], CD, threads=1),
        "eigenvalues": lambda: _native.eigvalsh(h, threads=1),
        "proxy": lambda: _native.proxy(w, None, h, threads=1),
        "prompt": prompt_in_a_loop,
        "read": lambda: _native.cpu_read(np.zeros(100, np.uint8), repeats=2**62, threads=1),
    }
    sent: list[float] = []

    def press() -> None:
        time.sleep(0.3)
        # Of the processor, not of the wall: other work on the machine must not fail the test.
        sent.append(time.process_time())
        signal.raise_signal(signal.SIGINT)

    # A process that was started in the background may have been told to ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            calls[work]()
    finally:
        signal.signal(signal.SIGINT, before)
    took = time.process_time() - sent[0]
    thread.join()
    assert took < 1.0, f"{took:.2f} s"


def test_other_threads_run_meanwhile() -> None:
    h = np.eye(1200) + 1.0
    ticks: list[int] = []
    work = threading.Thread(target=_native.eigvalsh, args=(h, 1))
    work.start()
    while work.is_alive():
        ticks.append(1)
        time.sleep(0.001)
    work.join()
    assert len(ticks) > 3
