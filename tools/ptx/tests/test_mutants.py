"""The interpreter must notice what it is there for: the kernels' PTX with one operand, modifier or barrier changed.

Every change compiles (or would); none can be seen by compiling. The edits name instructions, never registers, so that
they outlive changes of the kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from tests.support.cuda import nvrtc
from tests.support.cuda.cases import Case, from_bf16, make_problem, relative_l2, run, to_bf16
from tools.ptx import kernels
from tools.ptx.compile import Program
from tools.ptx.machine import launch
from tools.ptx.memory import Global
from tools.ptx.parse import PtxError

pytestmark = pytest.mark.skipif(
    nvrtc.library() is None,
    reason="NO NVRTC: the PTX interpreter is NOT tested on the kernels here; install the extra cuda12 or cuda13",
)

# Pairs of strips that warps share, and pairs that one warp has whole; one and four tiles of tokens.
CASES = [
    Case(k=992, n=80, tokens=5, slices=2, warps=4),
    Case(k=992, n=144, tokens=5, slices=2, warps=3),
    Case(k=992, n=80, tokens=25, slices=2, warps=5),
]
SEEDS = 3
LIMIT = 20_000  # basic blocks: an altered wait may spin for ever
ANY = r"[^;]*"
REGISTER = r"%\w+"
MMA = r"(mma\.sync[\w.]+ *)(\{[^}]*\}), *(\{[^}]*\}), *(\{[^}]*\}), *(\{[^}]*\});"


def cases(tokens: int, seeds: int = SEEDS) -> list[Case]:
    return [
        replace(case, seed=seed)
        for seed in range(seeds)
        for case in CASES
        if (case.tokens > 8) == (tokens > 8)
    ]


@cache
def original(target: int, tokens: int = 5) -> str:
    return kernels.ptx_text(kernels.GEMM[0], cases(tokens)[0].variant.defines, target)


def complaint(text: str, target: int, tokens: int = 5, seeds: int = SEEDS) -> str | None:
    """What some cut and order of warps shows: an error, "wrong result", or None."""
    code = kernels.programs(text, target)[kernels.GEMM[1]]
    for case in cases(tokens, seeds):
        problem = make_problem(case)
        gemm = partial(kernels.run_gemm, target=target, code=code, limit=LIMIT)
        try:
            result = run(problem, None, gemm)
        except (PtxError, AssertionError) as error:
            return str(error)
        if not relative_l2(result, problem.expected) < 1e-6:
            return "wrong result"
    return None


def swap(vector: str, i: int, j: int) -> str:
    parts = vector.strip("{}").split(",")
    parts[i], parts[j] = parts[j], parts[i]
    return "{" + ",".join(parts) + "}"


def in_mma(operand: int, i: int, j: int) -> Callable[[re.Match[str]], str]:
    """Swaps two registers of one operand (0: d, 1: a, 2: b, 3: c)."""

    def edit(match: re.Match[str]) -> str:
        operands = [match[k] for k in (2, 3, 4, 5)]
        operands[operand] = swap(operands[operand], i, j)
        return f"{match[1]} {', '.join(operands)};"

    return edit


def other_number(match: re.Match[str]) -> str:
    return f"{match[1]}{int(match[2]) + 1};"


def instead(statement: str, register: str) -> Callable[[re.Match[str]], str]:
    """Computes the last operand anew before the instruction."""

    def edit(match: re.Match[str]) -> str:
        return f"{{ .reg .u32 t; {statement.format(match[2])} {match[1]}{register}; }}"

    return edit


BOTH = [80, 90]
# name: pattern of which the first match is changed, its replacement, where it applies, words of the complaint
MUTANTS: dict[str, tuple[str, str | Callable[[re.Match[str]], str], list[int], str]] = {
    "two registers of A": (MMA, in_mma(1, 1, 2), BOTH, "wrong result"),
    "halves of B": (MMA, in_mma(2, 0, 1), BOTH, "wrong result"),
    "two results": (MMA, in_mma(0, 1, 2), BOTH, "wrong result"),
    "the other 16-bit type": (r"\.bf16\.bf16\.f32", ".f16.f16.f32", BOTH, "wrong result"),
    "two matrices of ldmatrix": (
        r"(ldmatrix[\w.]+\s*)(\{[^}]*\})",
        lambda m: m[1] + swap(m[2], 1, 2),
        BOTH,
        "wrong result",
    ),
    # ptxas makes one LOP3 of such an AND and what follows it.
    "a narrower mask": (
        rf"and\.b32(\s+{REGISTER}, {REGISTER}, )983055;",
        r"and.b32\g<1>458759;",
        BOTH,
        "wrong result",
    ),
    "the sign of an offset": (
        rf"(fma\.rn\.bf16x2\s+{REGISTER}, {REGISTER}, {REGISTER}, )({REGISTER});",
        instead("xor.b32 t, {}, 0x80008000;", "t"),
        BOTH,
        "wrong result",
    ),
    "one copy too many in flight": (
        r"(cp\.async\.wait_group )(\d+);",
        other_number,
        BOTH,
        "in flight",
    ),
    "no wait for copies": (r"cp\.async\.wait_group \d+;", "", BOTH, "in flight"),
    "copies in no group": (r"cp\.async\.commit_group;", "", BOTH, "in flight"),
    "an earlier kernel not waited for": (
        r"griddepcontrol\.wait;",
        "",
        [90],
        "before griddepcontrol.wait",
    ),
    "partial sums through L1": (r"ld\.global\.cg", "ld.global", BOTH, "L1 may hold"),
    "no fence before the counter": (r"fence\.acq_rel\.gpu;", "", BOTH, "no fence between"),
    "a counter not counted": (r"(atom\.global\.add[^;]*, )[^;]*;", r"\g<1>0;", BOTH, "wrong result"),
    "a scale of another column": (r"(ld\.shared\.u32[^;]*)\]", r"\1+4]", BOTH, ""),
    "words in another order": (
        r"(ld\.shared\.v4\.u32\s*)(\{[^}]*\})",
        lambda m: m[1] + swap(m[2], 0, 1),
        BOTH,
        "wrong result",
    ),
}
RUNS = [(name, target) for name, mutant in MUTANTS.items() for target in mutant[2]]


@pytest.mark.parametrize("target", BOTH)
def test_the_kernel_itself_gives_no_cause(target: int) -> None:
    assert complaint(original(target), target) is None


@pytest.mark.parametrize(("name", "target"), RUNS, ids=lambda v: str(v).replace(" ", "-"))
def test_a_change_is_noticed(name: str, target: int) -> None:
    pattern, replacement, _, message = MUTANTS[name]
    text, count = re.subn(pattern, replacement, original(target), count=1)
    assert count == 1, f"the mutant {name!r} no longer applies"
    found = complaint(text, target)
    assert found is not None, f"{name} was not noticed"
    assert message in found, found


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "bar.warp.sync 0xffffffff;"])
def test_every_barrier_is_needed(barrier: str) -> None:
    """Each taken out by itself. One of them keeps sums of many tokens off a ring that is still read."""
    found: list[list[str | None]] = []
    for tokens in (5, 25):
        text = original(80, tokens)
        starts = [match.start() for match in re.finditer(re.escape(barrier), text)]
        without = (text[:at] + text[at + len(barrier) :] for at in starts)
        # What another variant has shown to be needed is not tried again.
        known = found[-1] if found else [None] * len(starts)
        found.append([k or complaint(t, 80, tokens, 8) for k, t in zip(known, without, strict=True)])
    for index, complaints in enumerate(found[-1]):
        assert complaints, f"{barrier} number {index} may be missing unnoticed"


# ---- the product of many tokens ---------------------------------------------------------------------------------

MANY = Case(k=416, n=80, tokens=40, slices=2)
MANY_MUTANTS = {
    "no wait for copies": (r"cp\.async\.wait_group \d+;", "", "in flight"),
    "one copy too many in flight": (r"(cp\.async\.wait_group )(\d+);", other_number, "in flight"),
    "copies in no group": (r"cp\.async\.commit_group;", "", "in flight"),
    "no barrier of a stage": (r"bar\.sync 0;", "", "that is unwritten"),
    "no barrier before the fence": (
        r"bar\.warp\.sync 0xffffffff;(?=\s*(//[^\n]*\s*)*fence)",
        "",
        "no fence between",
    ),
    "no fence before the counter": (r"fence\.acq_rel\.gpu;", "", "no fence between that"),
    "partial sums through L1": (r"ld\.global\.cg", "ld.global", "L1 may hold"),
    "a counter not counted": (r"(atom\.global\.add[^;]*, )[^;]*;", r"\g<1>0;", "wrong result"),
    "zeros beyond K left out": (r"st\.shared\.v4\.u32[^;]*;", "", "unwritten"),
    "an earlier kernel not waited for": (r"griddepcontrol\.wait;", "", "before griddepcontrol.wait"),
    "a part not cleared": (
        rf"(fma\.rn\.bf16x2\s+{REGISTER}, )({REGISTER})(, {REGISTER}, {REGISTER};)",
        r"\g<1>0\3",
        "",
    ),
}


@cache
def many(target: int = 90) -> str:
    return kernels.ptx_text(kernels.TILED[0], MANY.variant.defines, target)


def complaint_of_many(text: str) -> str | None:
    code = kernels.programs(text, 90)[kernels.TILED[1]]
    for seed in range(2):
        problem = make_problem(replace(MANY, seed=seed))
        try:
            result = run(problem, None, partial(kernels.run_gemm, target=90, code=code, limit=LIMIT))
        except (PtxError, AssertionError) as error:
            return str(error) if isinstance(error, PtxError) else "wrong result"
        if not relative_l2(result, problem.expected) < 1e-6:
            return "wrong result"
    return None


def test_the_product_of_many_tokens_gives_no_cause() -> None:
    assert complaint_of_many(many()) is None


@pytest.mark.parametrize("name", MANY_MUTANTS)
def test_a_change_of_the_product_of_many_tokens_is_noticed(name: str) -> None:
    pattern, replacement, message = MANY_MUTANTS[name]
    # Zeros are written in several places, of which one may be never reached.
    text, count = re.subn(pattern, replacement, many(), count=0 if name.startswith("zeros") else 1)
    assert count, f"the mutant {name!r} no longer applies"
    found = complaint_of_many(text)
    assert found is not None, f"{name} was not noticed"
    assert message in found, found


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"(shfl\.sync\.bfly\.b32 [^,]*, [^,]*, )[^,]*(,)", r"\g<1>3\2"),
        (r"(shfl\.sync\.idx\.b32 [^,]*, [^,]*, )[^,]*(,)", r"\g<1>0\2"),
        (r"bar\.sync 0;", ""),
        (r"(ex2\.approx\.ftz\.f32\s+%\w+), %\w+;", r"\1, 0f00000000;"),
    ],
)
def test_changes_of_the_attention_are_noticed(pattern: str, replacement: str) -> None:
    text = kernels.ptx_text("fused_ops.cu", ("-DLQ_IO=Bf16Io",), 90)
    start = text.index(".entry loopq_rope_attention")
    altered, count = re.subn(pattern, replacement, text[start:])
    assert count
    assert attention(kernels.programs(text, 90)["loopq_rope_attention"]) < 1e-2
    try:
        error = attention(kernels.programs(text[:start] + altered, 90)["loopq_rope_attention"])
    except PtxError:
        return
    assert not error < 1e-2


def attention(code: Program) -> float:
    """Relative error of one head of 8 over 5 tokens."""
    rng = np.random.default_rng(0)
    qkv = to_bf16(rng.standard_normal((5, 24)))
    angle = np.outer(np.arange(5), [1.0, 0.5, 0.2, 0.1])
    rotation = np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)
    arrays = kernels.Arrays()
    pointers = [arrays.place("qkv", qkv)[0], 0, arrays.place("rotation", rotation)[0]]
    to, out = arrays.place("out", np.zeros((5, 8), np.uint16), writable=True)
    numbers = [np.int32(v) for v in (5, 1, 8, 24, 8)]
    memory = Global(arrays.regions)
    launch(code, (1, 1), 160, 3 * 5 * 9 * 4, [*pointers, to, *numbers, np.float32(8**-0.5)], memory)
    q, k, v = from_bf16(qkv).astype(np.float64).reshape(5, 3, 4, 2).transpose(1, 0, 2, 3)
    turn = np.exp(1j * angle)
    q, k = ((m[..., 0] + 1j * m[..., 1]) * turn for m in (q, k))
    score = np.where(np.tri(5, dtype=bool), (q @ k.conj().T).real * 8**-0.5, -np.inf)
    weight = np.exp(score - score.max(axis=1, keepdims=True))
    expected = weight / weight.sum(axis=1, keepdims=True) @ v.reshape(5, 8)
    return relative_l2(from_bf16(out), expected)
