"""Random problems for the int4 product, their float64 answers, and one call that emulates the kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from loopq.runtime.cuda.layout import level_bytes, pack_w4
from loopq.runtime.cuda.plan import (
    H200,
    TOKENS_PER_LAUNCH,
    GemmShape,
    NarrowPlan,
    Variant,
    fold_of,
    token_tiles_for,
)
from loopq.runtime.cuda.tiled import TiledPlan, TiledVariant, make_tiled_plan
from tests.support.cuda.emulation import run_gemm

POISON = 0x7FC1  # a NaN in bfloat16 and in float16
OUT_FLOAT32, EVICT_FIRST = 1, 2
TABLE = (-127, -126, -64, -33, -17, -8, -1, 0, 1, 2, 5, 31, 65, 96, 125, 127)


def to_bf16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_fp16(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).view(np.uint16)


def from_fp16(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float16).astype(np.float32)


@dataclass(frozen=True)
class Case:
    k: int
    n: int
    tokens: int
    group: int = 128
    activation: str = "bf16"
    scales: str = "f32"
    blocks: int = 1
    slices: int = 1
    warps: int = 4
    stages: int = 4
    k_begin: int = 0
    k_end: int | None = None
    bias: bool = False
    addend: bool = False
    out_float32: bool = True
    x_gap: int = 8
    out_gap: int = 3
    seed: int = 0

    @property
    def end(self) -> int:
        return self.k if self.k_end is None else self.k_end

    @property
    def levels(self) -> tuple[int, ...] | None:
        return TABLE if self.activation.endswith("table") else None

    @property
    def tiled(self) -> bool:
        return self.tokens > TOKENS_PER_LAUNCH

    @property
    def variant(self) -> Variant | TiledVariant:
        fold, _ = fold_of(self.group)
        if self.tiled:
            return TiledVariant(
                self.activation, 1 if self.tokens <= 64 else 2, min(fold, 2), self.stages, self.scales
            )
        return Variant(self.activation, token_tiles_for(self.tokens), fold, self.stages, self.scales)

    @property
    def plan(self) -> NarrowPlan | TiledPlan:
        """The case's own cut; of a tiled product only its slices and its ring are free."""
        fold, shift = fold_of(self.group)
        if self.tiled:
            layer = (self.n, self.k_begin, self.end, self.group)
            types = (self.activation, self.scales)
            return make_tiled_plan(layer, self.tokens, H200, *types, self.stages, self.slices)
        shape = GemmShape(self.n, self.k_begin, self.end, self.group, 1)
        slices = min(self.slices, shape.stages)
        tiles = min(2 * -(-shape.stages // slices), shape.tiles)
        return NarrowPlan(self.blocks, slices, self.warps, self.stages, tiles, fold, shift)


@dataclass
class Problem:
    """Stored integers with their values and scales, x with poison in its gaps, and the float64 product."""

    case: Case
    codes: np.ndarray
    values: np.ndarray
    scale_bits: np.ndarray
    x: np.ndarray
    bias: np.ndarray | None
    addend: np.ndarray | None
    expected: np.ndarray


def make_problem(case: Case, seed: int = 1) -> Problem:
    rng = np.random.default_rng(seed)
    encode, decode = (to_bf16, from_bf16) if case.activation.startswith("bf16") else (to_fp16, from_fp16)
    codes = rng.integers(-8, 8, (case.n, case.k)).astype(np.int8)
    groups = 1 if case.group == -1 else -(-case.k // case.group)
    raw = rng.uniform(0.5, 2.0, (groups, case.n)).astype(np.float32)
    values = codes
    if case.levels is not None:
        values = np.array(case.levels)[codes + 8] / 16
        raw *= rng.choice(np.float32([-1, 1]), raw.shape)
    to_bits, to_float = {
        "f32": (lambda s: s, lambda s: s),
        "bf16": (to_bf16, from_bf16),
        "fp16": (to_fp16, from_fp16),
    }[case.scales]
    scale_bits = to_bits(raw)
    width = case.end - case.k_begin
    x = np.full((case.tokens, width + case.x_gap), POISON, np.uint16)
    # The largest stream of all tokens, drawn once, so that fewer tokens are a prefix of more.
    x[:, :width] = encode(rng.standard_normal((max(64, case.tokens), case.k)))[
        : case.tokens, case.k_begin : case.end
    ]
    size = case.k if case.group == -1 else case.group
    weights = values * np.repeat(to_float(scale_bits).T.astype(np.float64), size, axis=1)[:, : case.k]
    expected = decode(x[:, :width]).astype(np.float64) @ weights[:, case.k_begin : case.end].T
    bias = rng.standard_normal(case.n).astype(np.float32) if case.bias else None
    addend = rng.standard_normal((case.tokens, case.n + 5)).astype(np.float32) if case.addend else None
    if bias is not None:
        expected = expected + bias
    if addend is not None:
        addend[:, case.n :] = np.nan
        expected = expected + addend[:, : case.n]
    return Problem(case, codes, values, scale_bits, x, bias, addend, expected)


def run(
    problem: Problem, shared_bytes: int | None = None, gemm: Callable[..., np.ndarray] | None = None
) -> np.ndarray:
    """The kernel's output as float32, gaps of `out` checked to be untouched; by the host emulation or `gemm`."""
    case = problem.case
    flags = OUT_FLOAT32 * case.out_float32 | EVICT_FIRST
    stride = case.n + case.out_gap
    fill = np.float32(np.nan) if case.out_float32 else np.uint16(POISON)
    out = np.full((case.tokens, stride), fill)
    scalars = (
        case.tokens,
        case.n,
        -(-case.k // 64),
        case.k_begin,
        case.end,
        problem.x.shape[1],
        stride,
        0 if problem.addend is None else problem.addend.shape[1],
        case.plan.group_shift,
        problem.scale_bits.shape[0],
        flags,
        *level_bytes(case.levels).tolist(),
    )
    written = (gemm or run_gemm)(
        case.variant,
        case.plan,
        x=problem.x,
        weights=pack_w4(problem.codes),
        scales=problem.scale_bits,
        out=out,
        scalars=scalars,
        bias=problem.bias,
        addend=problem.addend,
        seed=case.seed,
        shared_bytes=shared_bytes,
    )
    assert (written[:, case.n :].tobytes()) == (out[:, case.n :].tobytes()), (
        "the gap between rows was written"
    )
    result = written[:, : case.n]
    if case.out_float32:
        return result
    return (from_bf16 if case.activation.startswith("bf16") else from_fp16)(np.ascontiguousarray(result))


def relative_l2(result: np.ndarray, expected: np.ndarray) -> float:
    difference = np.linalg.norm(result.astype(np.float64) - expected)
    return float(difference / np.linalg.norm(expected))


def solve(case: Case, **changes: object) -> tuple[np.ndarray, Problem]:
    problem = make_problem(replace(case, **changes))  # type: ignore[arg-type]
    return run(problem), problem
