"""A backend that runs launches of CPU tensors through the PTX interpreter.

A launch has only pointers. How far each of them may be used follows from the contract of its kernel
(`kernels/README.md`), so that an access one element beyond a matrix is noticed inside of a larger tensor too.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from loopq.cuda.load import Kernel
from loopq.cuda.plan import DeviceLimits
from tests.support.cuda.backend import HostBackend
from tools.ptx.kernels import program
from tools.ptx.machine import launch
from tools.ptx.memory import Global, Region


class Extent(NamedTuple):
    """What a kernel may touch behind one pointer."""

    name: str
    n_bytes: int
    writable: bool = False
    constant: bool = False  # weights: no earlier kernel writes them


def _rows(rows: int, stride: int, width: int, size: int) -> int:
    return ((rows - 1) * stride + width) * size


def _gemm(kernel: Kernel, grid: tuple[int, int], n: Sequence[int]) -> list[Extent]:
    m, width, k_tiles, k_begin, k_end, x_stride, out_stride, addend_stride, _, scale_rows, flags = n[:11]
    defines = dict(d[2:].split("=") for d in kernel.defines)
    units = (width // 16 + 1) // 2
    floats = 256 * int(defines.get("LQ_MT", 8))
    if "LQ_TOKEN_WARPS" in defines:
        units *= -(-m // 64)
    scale_size = 4 if defines["LQ_SCALE"] == "ScaleF32" else 2
    return [
        Extent("x", _rows(m, x_stride, k_end - k_begin, 2)),
        Extent("weights", width // 16 * k_tiles * 512, constant=True),
        Extent("scales", scale_rows * width * scale_size, constant=True),
        Extent("out", _rows(m, out_stride, width, 4 if flags & 1 else 2), writable=True),
        Extent("bias", width * 4),
        Extent("addend", _rows(m, addend_stride, width, 4)),
        Extent("partials", (grid[1] > 1) * grid[1] * units * floats * 4, writable=True),
        Extent("counters", (grid[1] > 1) * units * 4, writable=True),
    ]


def _add_norm(kernel: Kernel, grid: tuple[int, int], n: Sequence[int]) -> list[Extent]:
    width, a, residual, y, z = n
    rows = grid[0]
    return [
        Extent("a", _rows(rows, a, width, 2)),
        Extent("residual", _rows(rows, residual, width, 2)),
        Extent("weight1", width * 2),
        Extent("weight2", width * 2),
        Extent("y", _rows(rows, y, width, 2), writable=True),
        Extent("z", _rows(rows, z, width, 2), writable=True),
    ]


def _rope_attention(kernel: Kernel, grid: tuple[int, int], n: Sequence[int]) -> list[Extent]:
    tokens, heads, head, qkv_stride, out_stride = n
    rows = grid[1] * tokens
    return [
        Extent("qkv", _rows(rows, qkv_stride, 3 * heads * head, 2)),
        Extent("qk_bias", 2 * heads * head * 2),
        Extent("rotation", tokens * head * 4),
        Extent("out", _rows(rows, out_stride, heads * head, 2), writable=True),
    ]


def _swiglu(kernel: Kernel, grid: tuple[int, int], n: Sequence[int]) -> list[Extent]:
    rows, width, gate_up_stride, out_stride = n
    return [
        Extent("gate_up", _rows(rows, gate_up_stride, 2 * width, 2)),
        Extent("out", _rows(rows, out_stride, width, 2), writable=True),
    ]


def _dequantize(kernel: Kernel, grid: tuple[int, int], n: Sequence[int]) -> list[Extent]:
    out_features, in_features, k_tiles, _, scale_rows, kind = n[:6]
    return [
        Extent("weights", out_features // 16 * k_tiles * 512),
        Extent("scales", scale_rows * out_features * (4 if kind == 0 else 2)),
        Extent("out", out_features * in_features * 2, writable=True),
    ]


def _beam(kernel: Kernel, grid: tuple[int, int], n: Sequence[int]) -> list[Extent]:
    rows, per_matrix, top = n
    paths, matrices = int(kernel.defines[0].split("=")[1]), rows // per_matrix
    return [
        Extent("ahead", rows * paths * 64 * 4, writable=True),
        Extent("origin", rows * paths * 8, writable=True),
        Extent("cost", rows * paths * 4, writable=True),
        *(Extent(name, rows * 128 * 4) for name in ("original", "scale", "zero")),
        Extent("upper", matrices * 128 * 64 * 4),
        Extent("pivots", matrices * 64 * 4),
        Extent("levels", (top + 1) * 4),
        Extent("between", top * 4),
    ]


def _descent(kernel: Kernel, grid: tuple[int, int], n: Sequence[int]) -> list[Extent]:
    rows, (per_matrix, columns, width, top) = grid[0], n[:4]
    numbers, levels = rows * columns, rows * -(-columns // width)
    return [
        Extent("steps", numbers * 4, writable=True),
        Extent("values", numbers * 8, writable=True),
        Extent("gradient", numbers * 8, writable=True),
        Extent("loss", rows * 8, writable=True),
        Extent("scale", levels * 4, writable=True),
        Extent("zero", levels * 4),
        Extent("active", rows * 4),
        Extent("matrix", rows // per_matrix * columns**2 * 8),
        Extent("energy", rows // per_matrix * columns * 8),
        Extent("levels", (top + 1) * 4),
        Extent("between", top * 8),
        Extent("out", rows * (8 if kernel.defines[0].endswith("1") else width * 8), writable=True),
    ]


_CONTRACTS: dict[str, Callable[[Kernel, tuple[int, int], Sequence[int]], list[Extent]]] = {
    "loopq_w4a16_gemm": _gemm,
    "loopq_w4a16_tiled": _gemm,
    "loopq_add_norm": _add_norm,
    "loopq_beam": _beam,
    "loopq_descent": _descent,
    "loopq_rope_attention": _rope_attention,
    "loopq_swiglu": _swiglu,
    "loopq_w4_dequantize": _dequantize,
}


class PtxBackend(HostBackend):
    """A small device of compute capability 8.0 or 9.0; counts what was launched."""

    def __init__(self, target: int, multiprocessors: int = 4) -> None:
        self.target = target
        self.limits = DeviceLimits(multiprocessors, 160_000, (target // 10, 0))
        self.ring_stages: int | None = 4
        self.device = torch.device("cpu")
        self.launches: Counter[str] = Counter()

    def launch(
        self, kernel: Kernel, grid: tuple[int, int], threads: int, shared_bytes: int, args: Sequence[Any]
    ) -> None:
        self.launches[kernel.entry] += 1
        assert shared_bytes <= self.limits.shared_bytes
        pointers = [a for a in args if isinstance(a, int)]
        numbers = [int(a) for a in args if isinstance(a, np.int32)]
        extents = _CONTRACTS[kernel.entry](kernel, grid, numbers)
        regions = [
            Region(e.name, p, _bytes_at(p, e.n_bytes), e.writable, e.constant)
            for p, e in zip(pointers, extents, strict=True)
            if p and e.n_bytes
        ]
        seed = self.launches.total()
        code = program(kernel, self.target)
        launch(code, grid, threads, shared_bytes, args, Global(regions), seed, overlap=self.target >= 90)


def _bytes_at(address: int, n_bytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))
