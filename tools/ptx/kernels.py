"""The kernels of `kernels/` through the PTX interpreter: programs by NVRTC, arrays, and a backend for the runner."""

from __future__ import annotations

import hashlib
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from loopq.cuda.load import Kernel
from loopq.cuda.plan import Plan, Variant
from loopq.cuda.sources import translation_unit
from loopq.cuda.tiled import TiledPlan, TiledVariant
from tests.support.cuda import nvrtc
from tests.support.cuda.emulation import Sizes
from tools.ptx.compile import Program
from tools.ptx.machine import launch
from tools.ptx.memory import Global, Region
from tools.ptx.parse import parse

ROOT = Path(__file__).resolve().parents[2]
GAP = 1 << 20  # bytes that belong to nobody, between arrays
GEMM = ("w4a16_gemm.cu", "loopq_w4a16_gemm")
TILED = ("w4a16_tiled.cu", "loopq_w4a16_tiled")


@cache
def ptx_text(file: str, defines: tuple[str, ...], target: int) -> str:
    """PTX of a kernel file with the loader's options, for compute_80 or compute_90; kept per state of the source."""
    source = translation_unit(file)
    options = [f"-arch=compute_{target}", "-std=c++17", *defines]
    compiler = Path(str(getattr(nvrtc.library(), "_name", "")))
    key = "\0".join((source, *options, str(compiler), str(compiler.stat().st_mtime_ns)))
    kept = ROOT / ".cache" / "kernel-ptx" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.ptx"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, suffix=".ptx", delete=False) as scratch:
            scratch.write(nvrtc.compile_ptx(source, file, options))
        Path(scratch.name).replace(kept)
    return kept.read_text()


@cache
def program(kernel: Kernel, target: int) -> Program:
    return programs(ptx_text(kernel.file, kernel.defines, target), target)[kernel.entry]


def programs(text: str, target: int) -> dict[str, Program]:
    return {name: Program(kernel, target) for name, kernel in parse(text).items()}


def gemm_program(variant: Variant | TiledVariant, target: int) -> Program:
    return program(Kernel(*(GEMM if isinstance(variant, Variant) else TILED), variant.defines), target)


class Arrays:
    """Copies of arrays at made-up addresses, `GAP` bytes apart."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.next = 0x7F0000000000

    def place(
        self, name: str, array: np.ndarray | None, writable: bool = False, constant: bool = False
    ) -> tuple[int, np.ndarray]:
        """Address and the copy that a launch works on."""
        if array is None:
            return 0, np.zeros(0)
        data = np.frombuffer(bytearray(np.ascontiguousarray(array).tobytes()), np.uint8)
        self.regions.append(Region(name, self.next, data, writable, constant))
        address = self.next
        self.next += -(-len(data) // 256) * 256 + GAP
        return address, data.view(array.dtype).reshape(array.shape)


def run_gemm(
    variant: Variant | TiledVariant,
    plan: Plan | TiledPlan,
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
    target: int = 80,
    code: Program | None = None,
    limit: int = 5_000_000,
) -> np.ndarray:
    """One launch, as `emulation.run_gemm`; `code` in place of the kernel's own PTX. Returns the output."""
    sizes = Sizes.of(variant, plan, *scalars[:2])
    arrays = Arrays()
    partials = np.full(sizes.partial_floats, np.nan, np.float32) if sizes.partial_floats else None
    placed = [
        arrays.place("x", x),
        arrays.place("weights", weights, constant=True),
        arrays.place("scales", scales, constant=True),
        arrays.place("out", out, writable=True),
        arrays.place("bias", bias),
        arrays.place("addend", addend),
        arrays.place("partials", partials, writable=True),
        arrays.place("counters", np.zeros(sizes.counters, np.uint32), writable=True),
    ]
    if shared_bytes is None:
        shared_bytes = sizes.shared_bytes
    launch(
        code or gemm_program(variant, target),
        sizes.grid,
        sizes.threads,
        shared_bytes,
        [*(address for address, _ in placed), *(np.int32(v) for v in scalars)],
        Global(arrays.regions),
        seed,
        overlap=target >= 90,
        limit=limit,
    )
    assert not placed[7][1].any(), "the kernel must leave its counters at zero"
    return placed[3][1].copy()
