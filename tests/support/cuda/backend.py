"""A backend that runs launches of CPU tensors through the emulation, with the arguments CuPy would get."""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benches.kernels.timed import Captured
from loopq.quantizers.cuda.load import Kernel
from loopq.runtime.cuda.plan import ACTIVATION_TYPES, DeviceLimits
from tests.support.cuda.emulation import EmulationError, library

ENTRIES = {
    "loopq_beam": ("emulate_beam", 10),
    "loopq_descent": ("emulate_descent", 12),
    "loopq_w4_dequantize": ("emulate_w4_dequantize", 3),
}


class EmulatedBackend:
    """A small device with `multiprocessors`. It counts launches, records nothing and takes the host's time."""

    def __init__(self, multiprocessors: int = 6, shared_bytes: int = 200_000) -> None:
        self.limits = DeviceLimits(multiprocessors, shared_bytes, (9, 0))
        self.ring_stages: int | None = 4
        self.device = torch.device("cpu")
        self.launches: Counter[str] = Counter()

    def launch(
        self, kernel: Kernel, grid: tuple[int, int], threads: int, shared_bytes: int, args: Sequence[Any]
    ) -> None:
        self.launches[kernel.entry] += 1
        assert shared_bytes <= self.limits.shared_bytes
        defines = dict(d[2:].split("=") for d in kernel.defines)
        lib = library(8 if "LQ_TOKEN_WARPS" in defines else int(defines.get("LQ_MT", 1)))
        lib.emulator_forget_memory()
        lib.emulator_register(ctypes.c_void_p(4096), ctypes.c_size_t(1 << 62), 1, b"the process")
        pointers = [a for a in args if isinstance(a, int)]
        integers = [int(a) for a in args if isinstance(a, np.int32)]
        floats = [float(a) for a in args if isinstance(a, np.float32)]
        assert len(pointers) + len(integers) + len(floats) == len(args), (
            "every argument has one of three types"
        )
        shape = (ctypes.c_longlong * 4)(*grid, threads, shared_bytes)
        packed_pointers = (ctypes.c_void_p * len(pointers))(*pointers)
        packed_integers = (ctypes.c_int * len(integers))(*integers)
        seed = ctypes.c_uint64(self.launches.total())
        if kernel.entry in ("loopq_w4a16_gemm", "loopq_w4a16_tiled"):
            assert (len(pointers), len(integers), len(floats)) == (8, 15, 0)
            warps = int(defines.get("LQ_TOKEN_WARPS", 0))
            tiles = 8 * warps or int(defines["LQ_MT"])
            numbers = [int(defines.get(name, 0)) for name in ("LQ_FOLD", "LQ_STAGES")]
            scales = ("ScaleF32", "ScaleBf16", "ScaleFp16").index(defines["LQ_SCALE"])
            act = list(ACTIVATION_TYPES.values()).index(defines["LQ_ACT"])
            variant = (ctypes.c_int * 5)(act, tiles, *numbers, scales)
            assert threads <= int(defines.get("LQ_THREADS", 256))
            status = lib.emulate_w4a16_gemm(variant, shape, seed, packed_pointers, packed_integers)
        else:
            name, n_pointers = ENTRIES[kernel.entry]
            assert len(pointers) == n_pointers
            half = int(defines.get("LQ_FLOAT16", 0))
            half += 2 * int(defines.get("LQ_TABLE", 0)) + int(
                defines.get("LQ_PATHS", defines.get("LQ_CODES", 0))
            )
            number = ctypes.c_float(floats[0] if floats else 0.0)
            status = getattr(lib, name)(int(half), shape, seed, packed_pointers, packed_integers, number)
        if status:
            raise EmulationError(lib.emulator_error().decode())

    def capture(self, work: Callable[[], None], warm_up: Callable[[], None] | None = None) -> Captured:
        """The work itself, run at each replay."""
        (warm_up or work)()
        return Captured(work)

    def microseconds(self, work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        return (time.perf_counter() - started) * 1e6
