"""Builds and calls the host emulation: `kernels/*.cu` as C++ over `host/primitives_host.hpp`."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from loopq.runtime.cuda.plan import ACTIVATION_TYPES, NarrowPlan, Variant
from loopq.runtime.cuda.tiled import TiledPlan, TiledVariant

ROOT = Path(__file__).resolve().parents[3]
HOST = Path(__file__).resolve().parent / "host"
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
FLAGS += ["-Wno-unknown-pragmas", "-Wno-unused-function"]


class EmulationError(Exception):
    """The emulated kernel did something no GPU kernel may do; the message says which thread did what."""


def compiler() -> str:
    """Path of the C++ compiler. Without one the test is skipped."""
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        pytest.skip("NO C++ COMPILER: CUDA kernels are NOT tested here; install g++ or set CXX")
    return path


@cache
def library(token_tiles: int = 1) -> ctypes.CDLL:
    """The compiled emulation, built once per state of its sources.

    Parameters
    ----------
    token_tiles : int
        1, 2 or 4: whose variants of the int4 product it holds; 8: those of the tiled one. The small kernels are in
        all of them.
    """
    command = [compiler(), *FLAGS, f"-DLQ_HOST_TOKENS={token_tiles}"]
    digest = hashlib.sha256(" ".join(command).encode())
    for path in sorted([*HOST.glob("*"), *(ROOT / "kernels").glob("*.cu*")]):
        digest.update(path.read_bytes())
    folder = ROOT / ".cache" / "kernel-emulation"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{digest.hexdigest()[:24]}.so"
    if not target.exists():
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as scratch:
            pass
        subprocess.run([*command, "-o", scratch.name, str(HOST / "harness.cpp")], check=True)
        Path(scratch.name).replace(target)
    return open_library(target)


def open_library(path: Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(path))
    lib.emulator_error.restype = ctypes.c_char_p
    return lib


@dataclass
class Memory:
    """Arrays that the emulated kernel may touch, each between guard bytes that belong to nobody."""

    lib: ctypes.CDLL

    def __post_init__(self) -> None:
        self.lib.emulator_forget_memory()
        self.keep: list[np.ndarray] = []

    def place(
        self, array: np.ndarray | None, name: str, writable: bool = False
    ) -> tuple[int, np.ndarray | None]:
        """Copy of an array at a 256-byte aligned address, and that address."""
        if array is None:
            return 0, None
        raw = np.full(array.nbytes + 512, 0xFF, np.uint8)
        start = -raw.ctypes.data % 256
        inside = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        inside[...] = array
        self.keep.append(raw)
        address = raw.ctypes.data + start
        self.lib.emulator_register(
            ctypes.c_void_p(address), ctypes.c_size_t(array.nbytes), int(writable), name.encode()
        )
        return address, inside

    def check(self, status: int) -> None:
        if status:
            raise EmulationError(self.lib.emulator_error().decode())


@dataclass(frozen=True)
class Sizes:
    """The launch of a cut and the workspace of its partial sums."""

    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    partial_floats: int
    counters: int
    token_tiles: int

    @classmethod
    def of(cls, variant: Variant | TiledVariant, plan: NarrowPlan | TiledPlan, tokens: int, n: int) -> Sizes:
        if isinstance(variant, TiledVariant):
            assert isinstance(plan, TiledPlan)
            workspace = (plan.partial_floats, plan.units)
            grid = (plan.blocks, plan.slices)
            return cls(grid, variant.threads, plan.shared_bytes, *workspace, 8 * variant.token_warps)
        assert isinstance(plan, NarrowPlan)
        pairs = (n // 16 + 1) // 2
        floats = plan.slices * pairs * 256 * variant.token_tiles if plan.slices > 1 else 0
        shared = plan.shared_bytes(tokens, variant.token_tiles)
        return cls((plan.blocks, plan.slices), plan.warps * 32, shared, floats, pairs, variant.token_tiles)


def run_gemm(
    variant: Variant | TiledVariant,
    plan: NarrowPlan | TiledPlan,
    *,
    x: np.ndarray,
    weights: np.ndarray,
    scales: np.ndarray,
    out: np.ndarray,
    scalars: tuple[int, ...],
    bias: np.ndarray | None = None,
    addend: np.ndarray | None = None,
    seed: int = 0,
    shared_bytes: int | None = None,
) -> np.ndarray:
    """Runs one launch; `scalars` are the kernel's integer parameters in order. Returns the written output."""
    sizes = Sizes.of(variant, plan, *scalars[:2])
    memory = Memory(library(min(sizes.token_tiles, 8)))
    partials = np.full(max(sizes.partial_floats, 1), np.nan, np.float32)
    counters = np.zeros(sizes.counters, np.uint32)
    placed = [
        memory.place(x, "x"),
        memory.place(weights, "weights"),
        memory.place(scales, "scales"),
        memory.place(out, "out", writable=True),
        memory.place(bias, "bias"),
        memory.place(addend, "addend"),
        memory.place(partials, "partials", writable=True),
        memory.place(counters, "counters", writable=True),
    ]
    if shared_bytes is None:
        shared_bytes = sizes.shared_bytes
    scales = ("f32", "bf16", "fp16").index(variant.scales)
    choice = (
        list(ACTIVATION_TYPES).index(variant.activation),
        sizes.token_tiles,
        variant.fold,
        variant.stages,
        scales,
    )
    status = memory.lib.emulate_w4a16_gemm(
        (ctypes.c_int * 5)(*choice),
        (ctypes.c_longlong * 4)(*sizes.grid, sizes.threads, shared_bytes),
        ctypes.c_uint64(seed),
        (ctypes.c_void_p * 8)(*(address for address, _ in placed)),
        (ctypes.c_int * len(scalars))(*scalars),
    )
    memory.check(status)
    left_over = placed[7][1]
    assert left_over is not None
    assert not left_over.any(), "the kernel must leave its counters at zero"
    written = placed[3][1]
    assert written is not None
    return written.copy()
