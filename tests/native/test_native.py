"""The binding on NumPy arrays: against plain NumPy twins, golden vectors, and the interpreter's own rules."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopq import _native, errors

GOLDEN = Path(__file__).parents[1] / "golden"


def correlated(n: int, dim: int, seed: int = 0) -> np.ndarray:
    """Rows with neighbouring columns correlated and a common part."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, dim))
    x[:, 1:] += 0.8 * x[:, :-1]
    return (x + rng.standard_normal((n, 1))).astype(np.float32)


def summed(x: np.ndarray, **options: object) -> _native.HessianAccumulator:
    """A finished accumulator over one step."""
    made = _native.HessianAccumulator(x.shape[1], [0], per_step=True, **options)  # type: ignore[arg-type]
    made.update(0, x)
    made.finish()
    return made


def plain_gptq(
    w: np.ndarray, h: np.ndarray, bits: int, group: int, damping: float
) -> tuple[np.ndarray, np.ndarray]:
    """GPTQ as published, in float64: Cholesky factor of the inverse, scales at each group's start."""
    dim = len(h)
    damped = h + damping * np.mean(np.diag(h)) * np.eye(dim)
    u = np.linalg.cholesky(np.linalg.inv(damped)).T
    top = 2 ** (bits - 1) - 1
    v, codes, scales = w.astype(np.float64), np.zeros(w.shape, np.int64), []
    for j in range(dim):
        if j % group == 0:
            scales.append((np.abs(v[:, j : j + group]).max(1) / top).astype(np.float32))
        codes[:, j] = np.clip(np.rint(v[:, j] / scales[-1]), -top - 1, top)
        q = codes[:, j].astype(np.float32) * scales[-1]
        v[:, j + 1 :] -= np.outer((v[:, j] - q) / u[j, j], u[j, j + 1 :])
    return codes, np.stack(scales, 1)


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


@pytest.mark.parametrize("isa", _native.cpu_features())
def test_golden_hessian(isa: str) -> None:
    golden = json.loads((GOLDEN / "hessian.json").read_text())
    rows = (np.array(golden["rows"]) / golden["denominator"]).astype(np.float32)
    for given_rows in (rows, rows.astype(np.float16), (rows.view(np.uint32) >> 16).astype(np.uint16)):
        state = summed(given_rows, isa=isa).state()
        assert state["hi"][0].tolist() == golden["hi"]
        assert state["lo"][0].tolist() == golden["lo"]
        assert state["n_rows"] == [len(rows)]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_file_gives_the_bits_of_the_array(tmp_path: Path, dtype: str) -> None:
    x = correlated(1300, 40)
    rows = {"F32": x, "F16": x.astype(np.float16), "BF16": (x.view(np.uint32) >> 16).astype(np.uint16)}[dtype]
    (tmp_path / "rows").write_bytes(b"header!" + rows.tobytes())
    made = _native.HessianAccumulator(40, [0], per_step=True)
    row = rows.itemsize * 40
    for start in range(0, 1300, 500):
        n = min(500, 1300 - start)
        made.update_file(0, tmp_path / "rows", 7 + start * row, n, dtype)  # type: ignore[arg-type]
    made.finish()
    assert np.array_equal(made.matrix(), summed(rows).matrix())


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
    got = _native.gptq(w, h, bits=bits, group_size=group, damping=0.01, threads=1)
    codes, scales = plain_gptq(w, h, bits, group, 0.01)
    same = (got["codes"] == codes).all(1)
    assert same.mean() >= 0.9, "rows may differ only by ties"
    np.testing.assert_allclose(got["scales"][same], scales[same], rtol=2e-7)


def test_codes_are_those_of_plain_gptq_at_512() -> None:
    h = summed(correlated(2000, 512)).matrix()
    w = np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32)
    got = _native.gptq(w, h, bits=4, group_size=96, damping=0.01)
    assert np.array_equal(got["codes"], plain_gptq(w, h, 4, 96, 0.01)[0])


def test_report_and_shared_factor() -> None:
    x = correlated(800, 96)
    x[:, 17] = 0
    h = summed(x).matrix()
    w = np.random.default_rng(1).standard_normal((30, 96)).astype(np.float32)
    factor = _native.Factor(h, 0.05)
    got = _native.gptq(w, h, bits=3, group_size=32, damping=0.05, factor=factor)
    alone = _native.gptq(w, h, bits=3, group_size=32, damping=0.05)
    assert np.array_equal(got["codes"], alone["codes"])
    assert got["n_dead_columns"] == factor.n_dead_columns == 1
    hat = _native.dequantize(got["codes"], got["scales"], None, 32)
    gap = hat.astype(np.float64) - w
    assert got["proxy"] == pytest.approx(np.trace(gap @ h @ gap.T), rel=1e-9)
    assert _native.proxy(w, hat, h) == pytest.approx(got["proxy"], rel=1e-9)
    energy = np.trace(w.astype(np.float64) @ h @ w.T)
    assert got["proxy_relative"] == pytest.approx(got["proxy"] / energy, rel=1e-9)
    assert got["damping_abs"] == pytest.approx(0.05 * np.mean(np.diag(h)))
    with pytest.raises(errors.ConfigError, match="damping"):
        _native.gptq(w, h, bits=3, group_size=32, damping=0.01, factor=factor)


def test_act_order_is_plain_gptq_on_permuted_columns() -> None:
    h = summed(correlated(800, 64)).matrix()
    w = np.random.default_rng(1).standard_normal((20, 64)).astype(np.float32)
    got = _native.gptq(w, h, bits=4, group_size=-1, damping=0.01, act_order=True, scales="static")
    order = got["order"]
    assert np.array_equal(order, np.argsort(-np.diag(h), kind="stable"))
    codes, _ = plain_gptq(np.ascontiguousarray(w[:, order]), h[np.ix_(order, order)], 4, 64, 0.01)
    assert np.array_equal(got["codes"][:, order], codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_asymmetric_values_lie_on_their_grid(bits: int) -> None:
    rng = np.random.default_rng(3)
    w = (rng.standard_normal((9, 50)) + 0.4).astype(np.float32)
    got = _native.rtn(w, bits=bits, group_size=16, symmetric=False, scale_dtype="float16")
    assert got["codes"].dtype == np.uint8
    assert got["codes"].max() <= 2**bits - 1
    assert np.array_equal(got["scales"].astype(np.float16).astype(np.float32), got["scales"])
    zeros, scales = got["zeros"].repeat(16, 1)[:, :50], got["scales"].repeat(16, 1)[:, :50]
    hat = _native.dequantize(got["codes"], got["scales"], got["zeros"], 16)
    expected = (got["codes"].astype(np.float32) - zeros) * scales
    assert np.array_equal(hat, expected)
    assert np.all(np.abs(hat - w) <= 0.51 * scales + 1e-6)


def test_mse_scales_are_never_worse() -> None:
    w = np.random.default_rng(3).standard_normal((40, 96)).astype(np.float32)
    error = {}
    for search in ("max", "mse"):
        got = _native.rtn(w, bits=3, group_size=32, scale_search=search)  # type: ignore[arg-type]
        gap = (_native.dequantize(got["codes"], got["scales"], None, 32) - w).astype(np.float64)
        error[search] = (gap**2).reshape(40, 3, 32).sum(2)
    assert np.all(error["mse"] <= error["max"] * (1 + 1e-6))
    assert error["mse"].sum() < 0.9 * error["max"].sum()


def test_eigenvalues_are_those_of_lapack() -> None:
    h = summed(correlated(300, 120)).matrix()
    got, expected = _native.eigvalsh(h), np.linalg.eigvalsh(h)
    np.testing.assert_allclose(got, expected, atol=1e-12 * expected[-1])
    assert np.array_equal(_native.eigvalsh(h, threads=1), _native.eigvalsh(h, threads=2))


def test_arrays_that_do_not_fit_are_type_errors() -> None:
    made = _native.HessianAccumulator(4, [0], per_step=True)
    with pytest.raises(TypeError, match="float32, float16 or uint16"):
        made.update(0, np.zeros((2, 4)))
    with pytest.raises((TypeError, ValueError)):
        made.update(0, np.zeros((4, 8), np.float32)[:, ::2])
    with pytest.raises(errors.ConfigError, match=r"zero_offset = 8 .* uint8"):
        _native.pack_dense(np.zeros((1, 4), np.uint8), 4, 8)
    with pytest.raises(TypeError, match="two-dimensional"):
        _native.pack_dense(np.zeros(4, np.int64), 4)  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match="square"):
        _native.eigvalsh(np.zeros((2, 3)))


def test_errors_are_loopqs_own() -> None:
    w = np.ones((2, 4), np.float32)
    with pytest.raises(errors.ConfigError, match="group_size = -2"):
        _native.rtn(w, bits=4, group_size=-2)
    with pytest.raises(errors.SolveError, match="all zeros"):
        _native.gptq(w, np.zeros((4, 4)), bits=4, group_size=4, damping=0.1)
    with pytest.raises(errors.NonFiniteError, match="row 1, column 2"):
        _native.rtn(
            np.where(np.arange(8).reshape(2, 4) == 6, np.nan, w).astype(np.float32), bits=4, group_size=4
        )
    with pytest.raises(errors.DumpError, match="cannot read"):
        _native.HessianAccumulator(4, [0], per_step=True).update_file(0, "/nowhere", 0, 1, "F32")
    with pytest.raises(errors.ConfigError, match="isa"):
        _native.HessianAccumulator(4, [0], per_step=True, isa="mmx")


def test_progress_is_reported_and_may_stop_the_work() -> None:
    h, w = np.eye(1500) + 1.0, np.ones((3000, 1500), np.float32)
    seen: list[float] = []

    def stop(share: float) -> None:
        seen.append(share)
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        while not seen:
            _native.gptq(w, h, bits=4, group_size=128, damping=0.1, threads=1, progress=stop)
    assert 0.0 <= seen[0] <= 1.0


@pytest.mark.parametrize("work", ["solve", "eigenvalues"])
def test_ctrl_c_stops_within_a_second(work: str) -> None:
    """A second of this process's own time: other work on the machine does not count."""
    h, w = np.eye(3000) + 1.0, np.ones((12000, 3000), np.float32)
    sent: list[float] = []

    def press() -> None:
        time.sleep(0.3)
        sent.append(time.process_time())
        signal.raise_signal(signal.SIGINT)

    # A process that was started in the background may have been told to ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            if work == "solve":
                _native.gptq(w, h, bits=4, group_size=128, damping=0.1, threads=1)
            else:
                _native.eigvalsh(h, threads=1)
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
