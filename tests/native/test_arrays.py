"""Every array argument of the binding, in every order in memory, gives what its C-ordered copy gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopq import _native as native
from tests.support import core

Arrays = list[np.ndarray]


def strided(array: np.ndarray) -> np.ndarray:
    """Every third entry of a larger array along each axis, backwards along the last."""
    place = np.zeros([3 * n for n in array.shape], array.dtype)
    view = place[tuple(slice(None, None, 3) for _ in array.shape)][..., ::-1]
    view[...] = array
    return view


def misaligned(array: np.ndarray) -> np.ndarray:
    """The same one byte off its alignment."""
    bytes_ = np.zeros(array.nbytes + 1, np.uint8)[1:]
    view = bytes_.view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def read_only(array: np.ndarray) -> np.ndarray:
    """A Fortran-ordered view that cannot be written to."""
    copy = np.asfortranarray(array)
    copy.flags.writeable = False
    return copy


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "c": np.ascontiguousarray,
    "fortran": np.asfortranarray,
    "strided": strided,
    "misaligned": misaligned,
    "read only": read_only,
}


def spd(rng: np.random.Generator, n: int) -> np.ndarray:
    """A symmetric matrix of which only the upper triangle is filled, as all that is read."""
    x = rng.standard_normal((2 * n, n))
    return np.triu(x.T @ x)


def weight(rng: np.random.Generator, rows: int, dim: int) -> np.ndarray:
    """A weight."""
    return rng.standard_normal((rows, dim)).astype(np.float32)


GPTQ_CD = core.cd_settings(
    bits=3, group_size=8, symmetric=True, signed=True, scale_dtype="float32", beam=2, sweeps=4,
    rounds=2, refit=True,
)  # fmt: skip


def accumulated(step: Callable[[native.HessianAccumulator], object], dim: int) -> np.ndarray:
    """The Hessian after something was added."""
    hessian = native.HessianAccumulator(dim, [0], per_step=True)
    step(hessian)
    hessian.finish()
    return hessian.matrix()


def restored(hi: np.ndarray, lo: np.ndarray, dim: int) -> np.ndarray:
    """The Hessian of a saved state."""
    state: Any = {
        "spec_version": 1, "dim": dim, "steps": [0], "per_step": True, "n_rows": [1], "hi": [hi], "lo": [lo],
    }  # fmt: skip
    return native.HessianAccumulator.from_state(state).matrix()


def coupled(w: np.ndarray, h: np.ndarray, mu: np.ndarray, a: np.ndarray) -> dict[str, Any]:
    """Solve under a metric between outputs."""
    left = native.DampedFactor(a, np.ones(len(a)), order="conditional")
    return native.coupled(w, native.DampedFactor(h, mu, order="diagonal"), [left], GPTQ_CD)


def trellis(w: np.ndarray, h: np.ndarray, mu: np.ndarray, a: np.ndarray) -> dict[str, Any]:
    """Code on a trellis."""
    left = native.DampedFactor(a, np.ones(len(a)), order="natural")
    right = native.DampedFactor(h, mu, order="conditional")
    return core.trellis(w, right, [left], bits=2, group_size=8, scale_dtype="float32", state_bits=6)


def product(codes: np.ndarray, scales: np.ndarray, x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Activations times packed codes."""
    layout = native.CpuLayout(*codes.shape, native.Grid(bits=4, group_size=8))
    packed, out = np.zeros(layout.n_bytes, np.uint8), np.zeros((len(x), len(codes)), np.float32)
    layout.pack(codes, scales, packed)
    layout.multiply(packed, x, out, bias, precision="fixed24")
    return out


def rows(codes: np.ndarray, scales: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Some rows of packed codes."""
    layout = native.CpuLayout(*codes.shape, native.Grid(bits=4, group_size=8))
    packed = np.zeros(layout.n_bytes, np.uint8)
    layout.pack(codes, scales, packed)
    return layout.rows(packed, numbers)


def program(
    w: np.ndarray, bias: np.ndarray, x: np.ndarray, start: np.ndarray, angles: np.ndarray
) -> np.ndarray:
    """Logits of a decoder without blocks."""
    runner = native.CpuRunner(
        [(None, w, bias, None), (None, np.tile(w[:1], (w.shape[1], 2)), None, None)],
        [], [], [("keep", 0), ("start", 0), ("adapter", 1)], 0, precision="fixed24", kept="float32",
    )  # fmt: skip
    logits = np.zeros((len(x), len(w)), np.float32)
    runner.run(x, angles, logits, start)
    return logits


def cases(rng: np.random.Generator, m: int, d: int) -> dict[str, tuple[Callable[..., Any], Arrays]]:
    """Functions of arrays, with arrays in C order; the keys begin with the name of what they call."""
    w, h, mu = weight(rng, m, d), spd(rng, d), rng.random(d) + 1
    grid: dict[str, Any] = {"bits": 4, "group_size": 8}
    n_groups = -(-d // 8)
    codes = rng.integers(-8, 8, (m, d)).astype(np.int8)
    scales, zeros = rng.random((m, n_groups)).astype(np.float32) + 1, rng.integers(0, 16, (m, n_groups))
    tile = rng.integers(0, 16, (64, 32)).astype(np.uint8)
    words = native.marlin_pack(tile, np.ones((64, 1), np.float32))[0]
    tile_scales = rng.random((64, 2)).astype(np.float32)
    hi, lo = (rng.integers(0, 1000, d * (d + 1) // 2) for _ in range(2))
    factor = native.DampedFactor(h, mu)
    return {
        "rtn": (lambda w: core.rtn(w, **grid), [w]),
        "fit_levels": (
            lambda w, mu: np.array(
                native.fit_levels(
                    w, mu, native.Grid(bits=2, group_size=4, signed=True, levels=[-110, -20, 43, 127])
                )
            ),
            [w, mu],
        ),
        "DampedFactor, gptq": (
            lambda w, h, mu: core.gptq(w, native.DampedFactor(h, mu), **grid),
            [w, h, mu],
        ),
        "DampedFactor, gptq of float32 H": (
            lambda w, h, mu: core.gptq(w, native.DampedFactor(h, mu, precision="float32"), **grid),
            [w, h.astype(np.float32), mu],
        ),
        "DampedFactor, gptq_cd": (
            lambda w, h, mu: native.gptq_cd(w, native.DampedFactor(h, mu, order="conditional"), GPTQ_CD),
            [w, h, mu],
        ),
        "coupled": (coupled, [w, h, mu, spd(rng, m)]),
        "trellis": (trellis, [w, h, mu, spd(rng, m)]),
        "dequantize on a trellis": (
            lambda c, s: core.decode(c, s, **grid, state_bits=6, stream_rows=4),
            [codes, scales],
        ),
        "shift": (lambda w, cross: factor.shift(w, cross, 0.5), [w, rng.standard_normal((d, d))]),
        "proxy": (native.proxy, [w, weight(rng, m, d), h]),
        "eigvalsh": (native.eigvalsh, [h]),
        "count_above": (lambda h: native.count_above(h, [1e-2, 1e-1]), [h]),
        "dequantize": (lambda c, s: core.dequantize(c, s, None, 8), [codes, scales]),
        "dequantize of uint8": (
            lambda c, s, z: core.dequantize(c, s, z, 8),
            [codes.view(np.uint8), scales, zeros.astype(np.uint8)],
        ),
        "CpuLayout.rows": (rows, [codes, scales, np.array([0, len(codes) - 1, 0])]),
        "CpuLayout": (product, [codes, scales, weight(rng, 2, d), weight(rng, 1, m)[0]]),
        "CpuRunner": (
            program,
            [w, weight(rng, 1, m)[0], weight(rng, 3, d), weight(rng, 3, d), weight(rng, 3, 2)],
        ),
        "cpu_read": (native.cpu_read, [codes.view(np.uint8).ravel()]),
        "pack_dense": (lambda c: native.pack_dense(c, 4, 8), [codes]),
        "pack_dense of uint8": (lambda c: native.pack_dense(c, 8), [codes.view(np.uint8)]),
        "unpack_dense": (lambda p: native.unpack_dense(p, 4, d, 8), [native.pack_dense(codes, 4, 8)]),
        "marlin_pack": (native.marlin_pack, [tile, tile_scales]),
        "marlin_unpack": (native.marlin_unpack, [words, np.ascontiguousarray(tile_scales.T)]),
        "w4_pack": (native.w4_pack, [tile]),
        "w4_unpack": (lambda p: native.w4_unpack(p, 32), [native.w4_pack(tile)]),
        "HessianAccumulator, update": (lambda x: accumulated(lambda a: a.update(0, x), d), [w]),
        "HessianAccumulator, update of float16": (
            lambda x: accumulated(lambda a: a.update(0, x), d),
            [w.astype(np.float16)],
        ),
        "HessianAccumulator, update of bfloat16": (
            lambda x: accumulated(lambda a: a.update(0, x), d),
            [(w.view(np.uint32) >> 16).astype(np.uint16)],
        ),
        "HessianAccumulator, from_state": (lambda hi, lo: restored(hi, lo, d), [hi, lo]),
    }


NAMES = list(cases(np.random.default_rng(0), 3, 16))


def same(a: Any, b: Any) -> bool:
    """Whether two results have the same values."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return np.array_equal(a, b)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_order_in_memory_changes_nothing(name: str, data: st.DataObject) -> None:
    m, d, seed = (data.draw(st.integers(1, top)) for top in (20, 33, 99))
    run, arrays = cases(np.random.default_rng(seed), m, d)[name]
    layouts = [data.draw(st.sampled_from(sorted(LAYOUTS))) for _ in arrays]
    turned = [LAYOUTS[layout](array) for layout, array in zip(layouts, arrays, strict=True)]
    assert same(run(*turned), run(*arrays)), layouts


def test_every_function_that_takes_arrays_is_among_the_cases() -> None:
    without = {"cpu_engines", "cpu_features", "kernel_sources", "GptqCdSettings", "Grid"}
    public = {n for n in native.__all__ if not n.startswith("_") and callable(getattr(native, n))}
    assert public - without == {w for w in " ".join(NAMES).replace(",", "").split() if w in public}
