"""The core's functions with the fields of a grid as keywords, as tests vary them one by one."""

from __future__ import annotations

from typing import Any

import numpy as np

import loopq._native as native


def rtn(w: np.ndarray, *, threads: int = 0, **grid: Any) -> dict[str, Any]:
    """Round to nearest."""
    return native.rtn(w, native.Grid(**grid), threads=threads)


def gptq(
    w: np.ndarray, factor: native.DampedFactor, *, scales: Any = "group", block_size: int = 128,
    threads: int = 0, **grid: Any,
) -> dict[str, Any]:  # fmt: skip
    """Solve by GPTQ."""
    return native.gptq(w, factor, native.Grid(**grid), scales=scales, block_size=block_size, threads=threads)


def cd_settings(*, beam: int, sweeps: int, rounds: int, refit: bool, **grid: Any) -> native.GptqCdSettings:
    """Settings of GPTQ with coordinate descent, with the static scales of least error."""
    core_grid = native.Grid(**grid, scale_search="mse")
    return native.GptqCdSettings(core_grid, beam=beam, sweeps=sweeps, rounds=rounds, refit=refit)


def trellis(
    w: np.ndarray, factor: native.DampedFactor, left: list[native.DampedFactor], *, state_bits: int,
    threads: int = 0, **grid: Any,
) -> dict[str, Any]:  # fmt: skip
    """Code on a trellis."""
    return native.trellis(w, factor, left, native.Grid(**grid, trellis=(state_bits, 512)), threads=threads)


def dequantize(
    codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, group_size: int
) -> np.ndarray:
    """The values of codes of a plain grid."""
    grid = native.Grid(bits=8, group_size=group_size, symmetric=zeros is None)
    return native.dequantize(codes, scales, zeros, grid)


def decode(
    codes: np.ndarray, scales: np.ndarray, *, bits: int, group_size: int, state_bits: int, stream_rows: int
) -> np.ndarray:
    """The values of codes on a trellis."""
    grid = native.Grid(bits=bits, group_size=group_size, trellis=(state_bits, stream_rows))
    return native.dequantize(codes, scales, None, grid)
