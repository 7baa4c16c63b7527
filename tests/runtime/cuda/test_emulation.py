"""The unchanged kernel source on the CPU, over a checking stand-in for its primitives, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.cuda.cases import Case, from_bf16, make_problem, relative_l2, run, solve, to_bf16
from tests.support.cuda.emulation import EmulationError
from tests.support.marks import slow_unless

pytestmark = pytest.mark.kernels

TOLERANCE = 1e-6  # the bound; a float32 sum of these lengths stays near 1e-7

GROUPS = (32, 64, 128, 256, -1)
#: Cases by what is swept; those of a number of tokens above 32 take the tiled kernel.
SWEEPS: dict[str, list[Case]] = {
    "remainders of K": [
        Case(k=k, n=48, tokens=3, group=group, warps=3, seed=k)
        for k in (32, 64, 96, 128, 160, 192, 224, 480)
        for group in GROUPS
    ],
    "remainders of K, many tokens": [
        Case(k=k, n=48, tokens=tokens, group=group, slices=slices, seed=k)
        for k in (32, 96, 160, 480)
        for group in GROUPS
        for tokens in (40, 130)
        for slices in (1, 3)
    ],
    "tokens": [
        Case(k=416, n=80, tokens=tokens, blocks=2, slices=2, warps=3, seed=tokens) for tokens in range(1, 17)
    ],
    # Blocks of 64 tokens in part; the last block's pairs are in part beyond the outputs.
    "many tokens": [Case(k=416, n=304, tokens=33, slices=2, seed=33)],
    "ways of cutting": [
        Case(k=608, n=n, tokens=9, blocks=blocks, slices=slices, warps=warps, seed=n)
        for blocks, slices, warps, n in (
            (1, 1, 1, 16), (1, 1, 1, 160), (1, 1, 16, 32), (3, 1, 4, 112), (2, 5, 2, 64), (1, 9, 7, 48),
            (4, 2, 16, 256), (1, 3, 2, 272),
        )
    ],
    "ring depths": [
        *(
            Case(k=992, n=64, tokens=tokens, group=group, stages=stages, warps=3)
            for stages, tokens in ((2, 4), (3, 12))
            for group in (32, 64, 128)
        ),
        *(Case(k=992, n=80, tokens=tokens, stages=s, slices=2) for s in (2, 3) for tokens in (64, 70)),
    ],
    "types": [
        *(
            Case(k=352, n=48, tokens=4, activation=activation, scales=scales, group=group)
            for activation in ("bf16", "fp16")
            for scales in ("f32", "bf16", "fp16")
            for group in (32, 128)
        ),
        *(
            Case(k=352, n=48, tokens=tokens, activation=activation, scales=scales, group=group, slices=2)
            for activation, scales, group in (("bf16", "bf16", 64), ("fp16", "fp16", 32), ("fp16", "f32", 128))
            for tokens in (50, 100)
        ),
    ],
    "tables": [
        Case(k=352, n=48, tokens=tokens, activation=activation, scales=scales, group=group, slices=2)
        for activation, scales, group in (
            ("bf16-table", "bf16", 32), ("bf16-table", "f32", 128), ("fp16-table", "fp16", 64)
        )
        for tokens in (1, 7, 12, 30, 40, 100)
    ],
    "bias and addend": [Case(k=416, n=48, tokens=5, slices=s, bias=True, addend=True) for s in (1, 3)],
    "ranges of K": [
        Case(k=832, n=48, tokens=3, group=group, k_begin=begin, k_end=end, slices=2, warps=3)
        for begin, end in ((0, 416), (416, 832), (0, 96), (96, 832), (32, 64))
        for group in (32, 128)
    ],
}  # fmt: skip
HUGINN = [
    Case(k=10560, n=48, tokens=7, blocks=1, slices=4, warps=5),
    Case(k=5280, n=80, tokens=16, blocks=2, slices=3, warps=4),
    Case(k=17920, n=32, tokens=1, blocks=1, slices=7, warps=4),
]
SLOW: dict[str, list[Case]] = {
    "Huginn": [
        *HUGINN,
        *(
            replace(case, tokens=tokens, group=group, seed=tokens)
            for case in HUGINN
            for tokens in (1, 2, 7, 8, 9, 16)
            for group in (32, 64, 128, -1)
        ),
    ],
    "more tokens": [
        *(Case(k=416, n=80, tokens=t, blocks=2, slices=2, warps=3, seed=t) for t in (17, 24, 31, 32)),
        *(Case(k=416, n=304, tokens=t, slices=2, seed=t) for t in (48, 64, 65, 100, 128, 129, 200, 256)),
    ],
}


@pytest.mark.parametrize(
    ("sweep", "case"),
    slow_unless(
        lambda of: of[0] in SWEEPS, [(sweep, c) for sweep, cases in (SWEEPS | SLOW).items() for c in cases]
    ),
)
def test_products_are_those_of_float64(sweep: str, case: Case) -> None:
    result, problem = solve(case)
    assert relative_l2(result, problem.expected) < TOLERANCE, sweep


def test_bias_addend_rounding_and_a_range_of_k_with_many_tokens() -> None:
    for tokens in (33, 140):
        case = Case(k=832, n=48, tokens=tokens, k_begin=96, k_end=736, slices=2, bias=True, addend=True)
        exact, problem = solve(case)
        assert relative_l2(exact, problem.expected) < TOLERANCE
        rounded, _ = solve(case, out_float32=False)
        np.testing.assert_array_equal(rounded, from_bf16(to_bf16(exact)))


def test_neither_order_nor_the_number_of_tokens_changes_a_bit() -> None:
    case = Case(k=608, n=272, tokens=120, slices=4)
    first, _ = solve(case)
    for seed in (1, 2, 3):
        again, _ = solve(case, seed=seed)
        np.testing.assert_array_equal(again, first)
    part, _ = solve(case, tokens=70)
    np.testing.assert_array_equal(part, first[:70])


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    case = Case(k=1312, n=80, tokens=16, blocks=2, slices=3, warps=5)
    full, _ = solve(case)
    for tokens in (1, 7, 8, 9):
        part, _ = solve(case, tokens=tokens)
        np.testing.assert_array_equal(part, full[:tokens])


def test_order_of_threads_and_blocks_does_not_matter() -> None:
    case = Case(k=1312, n=112, tokens=5, blocks=2, slices=4, warps=5)
    first, _ = solve(case)
    for seed in range(1, 6):
        again, _ = solve(case, seed=seed)
        np.testing.assert_array_equal(again, first)


def test_sixteen_bit_output_is_rounded_once() -> None:
    case = Case(k=1312, n=80, tokens=7, out_float32=False, blocks=2, slices=3, warps=4)
    result, problem = solve(case)
    exact, _ = solve(case, out_float32=True)
    np.testing.assert_array_equal(result, from_bf16(to_bf16(exact)))
    correctly_rounded = from_bf16(to_bf16(problem.expected))
    assert relative_l2(result, correctly_rounded.astype(np.float64)) < 2e-4
    half, problem = solve(case, activation="fp16")
    np.testing.assert_allclose(half, problem.expected.astype(np.float16), rtol=1e-3)


def test_weights_are_exact() -> None:
    """One input at a time picks out one column of W: every q, and every level, must come out as exactly q * s."""
    case = Case(k=128, n=16, tokens=16, warps=1)
    for activation, group in (("bf16", 128), ("fp16", 128), ("bf16-table", 128), ("fp16-table", 256)):
        problem = make_problem(replace(case, activation=activation, group=group))
        one = 0x3F80 if activation.startswith("bf16") else 0x3C00
        for start in range(0, 128, 16):
            problem.x[:, :128] = 0
            problem.x[np.arange(16), start + np.arange(16)] = one
            values = problem.values[:, start : start + 16].astype(np.float32)
            np.testing.assert_array_equal(run(problem), (values * problem.scale_bits[0][:, None]).T)


def test_not_a_number_stays_in_its_token() -> None:
    problem = make_problem(Case(k=224, n=32, tokens=4))
    problem.x[2, 5] = 0x7FC0
    result = run(problem)
    assert np.isnan(result[2]).all()
    assert relative_l2(result[[0, 1, 3]], problem.expected[[0, 1, 3]]) < TOLERANCE


def test_too_little_shared_memory_is_seen() -> None:
    problem = make_problem(Case(k=1024, n=32, tokens=4, warps=1))
    needed = problem.case.plan.shared_bytes(4, 1)
    run(problem, shared_bytes=needed)
    with pytest.raises(EmulationError, match="shared access at byte"):
        run(problem, shared_bytes=needed - 16)


def test_an_array_too_short_is_seen() -> None:
    problem = make_problem(Case(k=224, n=32, tokens=4))
    problem.scale_bits = problem.scale_bits[:1]
    problem.codes = problem.codes[:, :96]
    with pytest.raises(EmulationError, match="outside memory"):
        run(problem)
