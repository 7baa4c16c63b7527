"""Hand-written PTX, run by the interpreter on arrays of words: eight words in and eight words out per thread."""

from __future__ import annotations

import numpy as np

from tools.ptx import kernels
from tools.ptx.compile import Program
from tools.ptx.machine import launch
from tools.ptx.memory import Global
from tools.ptx.parse import parse

WORDS = 8
_HEAD = """
.version 8.0
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 area[];
.visible .entry snippet(.param .u64 in, .param .u64 out)
{
    .reg .pred %p<16>;
    .reg .b16 %h<16>;
    .reg .b32 %r<64>;
    .reg .f32 %f<32>;
    .reg .b64 %d<32>;
    ld.param.u64 %d1, [in];
    ld.param.u64 %d2, [out];
    mov.u32 %r60, %tid.x;
    mov.u32 %r61, %ctaid.x;
    mov.u32 %r62, %ntid.x;
    mad.lo.s32 %r62, %r61, %r62, %r60;
    mul.wide.u32 %d5, %r62, 32;
    add.s64 %d3, %d1, %d5;
    add.s64 %d4, %d2, %d5;
    mov.u32 %r63, area;
    shl.b32 %r59, %r60, 4;
    add.s32 %r59, %r59, %r63;
"""
# Registers a body may use: %d1, %d2 bases of in and out; %d3, %d4 the thread's own 32 bytes of them; %r60 the thread;
# %r63 shared memory, %r59 the thread's own 16 bytes of it.


def execute(
    body: str,
    words: np.ndarray | None = None,
    *,
    threads: int = 32,
    blocks: int = 1,
    shared: int = 4096,
    seed: int = 0,
    target: int = 90,
    overlap: bool = False,
    limit: int = 100_000,
) -> np.ndarray:
    """Output words, uint32 (threads of the grid, 8); 0xEEEEEEEE where nothing was stored.

    `words` (threads, up to 8) are the input; int or float arrays are taken by their bits, fewer columns are filled up.
    """
    total = threads * blocks
    given = np.zeros((total, WORDS), np.uint32)
    if words is not None:
        bits = np.ascontiguousarray(words).view(np.uint32)
        given[:, : bits.shape[1]] = bits
    arrays = kernels.Arrays()
    source, _ = arrays.place("in", given)
    to, out = arrays.place("out", np.full((total, WORDS), 0xEEEEEEEE, np.uint32), writable=True)
    kernel = parse(f"{_HEAD}{body}\n    ret;\n}}\n")["snippet"]
    code = Program(kernel, target)
    launch(code, (blocks, 1), threads, shared, [source, to], Global(arrays.regions), seed, overlap, limit)
    return out


def load(count: int, first: int = 0) -> str:
    """Loads words 0.. of the thread's input into %r0.. (or from %r`first` on)."""
    return "".join(f"ld.global.u32 %r{first + i}, [%d3+{4 * i}];\n" for i in range(count))


def store(*registers: str) -> str:
    """Stores 32-bit registers to words 0.. of the thread's output."""
    return "".join(f"st.global.u32 [%d4+{4 * i}], {r};\n" for i, r in enumerate(registers))


def lanes(*columns: object) -> np.ndarray:
    """Input (32, columns) of uint32 from numbers (the same in every lane) or sequences of 32."""
    return np.stack([np.broadcast_to(np.asarray(c, np.int64), 32) for c in columns], axis=1).astype(np.uint32)
