"""NVRTC's own PTX of every kernel, interpreted on the CPU, against float64 and the host emulation.

The interpreter is written from the PTX ISA and knows nothing of `kernels/` or its host stand-in; its own tests are in
`test_instructions.py` and `test_memory.py`, and what it must notice in `test_mutants.py`.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from loopq.cuda import fused
from loopq.cuda.launch import Product, launch_dequantize, prove
from loopq.cuda.layout import pack_w4
from loopq.cuda.plan import Variant
from loopq.cuda.rollout import LoopParts, RolloutRunner, reference_rollout
from loopq.cuda.sources import kernel_sources
from loopq.cuda.tiled import TiledVariant
from loopq.cuda.w4a16 import dequantize_packed
from loopq.quantizers.twin import beam, descent
from tests.support.cuda import emulation, nvrtc
from tests.support.cuda.cases import TABLE, Case, Problem, from_bf16, make_problem, relative_l2, run, to_bf16
from tests.support.cuda.rollout import (
    WIDTH,
    assert_rounds_alike,
    draw,
    exact_rollout,
    huginn_like,
    relative,
    spacing,
)
from tests.support.twins import rounded, searched
from tools.ptx import kernels
from tools.ptx.backend import PtxBackend
from tools.ptx.parse import PtxError

pytestmark = pytest.mark.skipif(
    nvrtc.library() is None,
    reason="NO NVRTC: the kernels' PTX is NOT run here; install the extra cuda12 or cuda13",
)

TOLERANCE = 1e-6
by_target = pytest.mark.parametrize("target", [80, 90])
TYPES = [torch.bfloat16, torch.float16]


def interpret(problem: Problem, target: int, shared_bytes: int | None = None) -> np.ndarray:
    return run(problem, shared_bytes, partial(kernels.run_gemm, target=target))


def check(case: Case, target: int) -> np.ndarray:
    problem = make_problem(case)
    result = interpret(problem, target)
    assert relative_l2(result, problem.expected) < TOLERANCE, case
    return result


@by_target
@pytest.mark.parametrize("group", [32, 64, 128, 256, -1])
def test_groups_and_remainders_of_k(target: int, group: int) -> None:
    for k, slices, warps in ((32, 1, 2), (96, 1, 1), (160, 2, 3), (224, 1, 4), (480, 1, 3), (608, 2, 2)):
        check(Case(k=k, n=48, tokens=3, group=group, slices=slices, warps=warps, seed=k), target)


@by_target
@pytest.mark.parametrize("tokens", [1, 7, 9, 16, 17, 32])
def test_tokens(target: int, tokens: int) -> None:
    check(Case(k=416, n=80, tokens=tokens, blocks=2, slices=2, warps=3, seed=tokens), target)


@by_target
@pytest.mark.parametrize(
    ("tokens", "group", "n"), [(33, 128, 48), (64, 32, 80), (65, 64, 144), (128, -1, 48), (130, 128, 48)]
)
def test_many_tokens(target: int, tokens: int, group: int, n: int) -> None:
    case = Case(
        k=288, n=n, tokens=tokens, group=group, slices=2, seed=tokens, bias=tokens == 65, addend=tokens == 65
    )
    exact = check(case, target)
    np.testing.assert_array_equal(exact, run(make_problem(case)))


@by_target
def test_many_tokens_in_a_range_of_k_rounded_once(target: int) -> None:
    case = Case(
        k=416, n=48, tokens=40, activation="fp16", scales="fp16", group=32, k_begin=96, k_end=352, stages=3
    )
    exact = check(replace(case, scales="f32", group=128, stages=4), target)
    assert np.isfinite(exact).all()
    case = replace(case, activation="bf16")
    exact = check(case, target)
    rounded = interpret(make_problem(replace(case, out_float32=False)), target)
    np.testing.assert_array_equal(rounded, from_bf16(to_bf16(exact)))


@pytest.mark.parametrize(
    ("activation", "scales", "target", "group"),
    [
        ("bf16", "bf16", 80, 128),
        ("bf16", "bf16", 90, 32),
        ("bf16", "fp16", 90, 32),
        ("bf16", "fp16", 90, 128),
        ("fp16", "f32", 80, 32),
        ("fp16", "f32", 90, 128),
        ("fp16", "bf16", 90, 128),
        ("fp16", "fp16", 80, 32),
    ],
)
def test_types(activation: str, scales: str, target: int, group: int) -> None:
    """Each pair of types on some target; `test_every_variant` has them all."""
    check(Case(k=352, n=48, tokens=4, activation=activation, scales=scales, group=group), target)


@by_target
@pytest.mark.parametrize(
    ("activation", "scales", "group"), [("bf16-table", "f32", 128), ("fp16-table", "fp16", 64)]
)
def test_levels_of_a_table(target: int, activation: str, scales: str, group: int) -> None:
    """The same bits as the emulation: of one of its variants, for each kernel."""
    for tokens in (1, 12, 20, 40):
        case = Case(k=288, n=48, tokens=tokens, activation=activation, scales=scales, group=group, slices=2)
        exact = check(case, target)
        if emulation.compiler() is not None:
            np.testing.assert_array_equal(exact, run(make_problem(case)))


@by_target
@pytest.mark.parametrize(
    ("blocks", "slices", "warps", "n"),
    [(1, 1, 1, 16), (1, 1, 16, 32), (3, 1, 4, 112), (2, 5, 2, 64), (1, 4, 7, 48)],
)
def test_cuts(target: int, blocks: int, slices: int, warps: int, n: int) -> None:
    check(Case(k=608, n=n, tokens=5, blocks=blocks, slices=slices, warps=warps, seed=n), target)


@pytest.mark.parametrize(("stages", "target"), [(2, 80), (3, 90), (6, 90)])
def test_other_ring_depths(stages: int, target: int) -> None:
    check(Case(k=992, n=64, tokens=4, stages=stages, warps=3), target)


@by_target
def test_outputs_bias_and_addend(target: int) -> None:
    case = Case(k=416, n=48, tokens=5, bias=True, addend=True)
    for slices in (1, 3):
        exact = check(replace(case, slices=slices), target)
        rounded = interpret(make_problem(replace(case, slices=slices, out_float32=False)), target)
        np.testing.assert_array_equal(rounded, from_bf16(to_bf16(exact)))


@by_target
@pytest.mark.parametrize(("k_begin", "k_end"), [(0, 416), (416, 832), (96, 832), (32, 64)])
def test_ranges_of_k(target: int, k_begin: int, k_end: int) -> None:
    case = Case(k=832, n=48, tokens=3, k_begin=k_begin, k_end=k_end, slices=2, warps=3)
    check(case, target)


@by_target
def test_any_order_and_any_batch_give_the_same_bits(target: int) -> None:
    case = Case(k=608, n=112, tokens=7, blocks=2, slices=3, warps=3)
    first = check(case, target)
    for seed in (1, 2, 3):
        np.testing.assert_array_equal(interpret(make_problem(replace(case, seed=seed)), target), first)
    np.testing.assert_array_equal(interpret(make_problem(replace(case, tokens=2)), target), first[:2])


@pytest.mark.parametrize(("target", "activation"), [(80, "bf16"), (90, "fp16")])
def test_weights_are_exact(target: int, activation: str) -> None:
    """One input at a time picks out one column of W: every q in -8..7 must come out as exactly q * s."""
    problem = make_problem(Case(k=128, n=16, tokens=16, warps=1, activation=activation))
    for start in (0, 48, 112):
        problem.x[:, :128] = 0
        problem.x[np.arange(16), start + np.arange(16)] = 0x3F80 if activation == "bf16" else 0x3C00
        expected = (problem.codes * problem.scale_bits[0][:, None])[:, start : start + 16].T
        np.testing.assert_array_equal(interpret(problem, target), expected)


@pytest.mark.skipif(emulation.compiler() is None, reason="NO C++ COMPILER: nothing to compare with")
@by_target
@pytest.mark.parametrize(("group", "tokens"), [(32, 7), (64, 3), (128, 16), (128, 32), (-1, 5)])
def test_same_bits_as_the_host_emulation(target: int, group: int, tokens: int) -> None:
    """Both add a fragment's products in float64 and round once, so only a defect of one of them can differ."""
    case = Case(k=608, n=80, tokens=tokens, group=group, blocks=2, slices=2, warps=3)
    problem = make_problem(case)
    np.testing.assert_array_equal(interpret(problem, target), run(problem))


def test_huginn_width_at_full_length() -> None:
    check(Case(k=5280, n=48, tokens=7, slices=3, warps=5), 90)


@pytest.mark.slow
@by_target
@pytest.mark.parametrize("scales", ["f32", "bf16", "fp16"])
@pytest.mark.parametrize("activation", ["bf16", "fp16"])
def test_every_variant(target: int, activation: str, scales: str) -> None:
    for group in (32, 64, 128, 256, -1):
        for tokens in (1, 8, 16, 32):
            case = Case(k=736, n=80, tokens=tokens, group=group, blocks=2, slices=2, warps=3)
            check(replace(case, activation=activation, scales=scales, seed=group + tokens), target)


@pytest.mark.slow
@by_target
def test_huginn_widths(target: int) -> None:
    for k, slices in ((10560, 4), (17920, 7)):
        for tokens in (1, 7, 16):
            check(Case(k=k, n=48, tokens=tokens, slices=slices, warps=5), target)


# ---- what the interpreter refuses in these kernels --------------------------------------------------------------


@by_target
def test_too_little_memory_is_seen(target: int) -> None:
    problem = make_problem(Case(k=992, n=32, tokens=4, warps=2))
    needed = problem.case.plan.shared_bytes(4, 1)
    interpret(problem, target, needed)
    with pytest.raises(PtxError, match=r"shared access at byte \d+ of"):
        interpret(problem, target, needed - 16)
    problem.codes = problem.codes[:, :96]
    with pytest.raises(PtxError, match="of weights, outside memory"):
        interpret(problem, target)


# ---- the other kernels ------------------------------------------------------------------------------------------


@by_target
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("width", "residual", "second"), [(8, False, False), (264, True, True), (5280, True, True)]
)
def test_add_norm(target: int, dtype: torch.dtype, width: int, residual: bool, second: bool) -> None:
    a = draw(2, width + 8, dtype=dtype)[:, :width]
    r = draw(2, width, seed=1, dtype=dtype) if residual else None
    w1, w2 = draw(width, seed=2, dtype=dtype), draw(width, seed=3, dtype=dtype) if second else None
    y = torch.full((2, width + 16), torch.nan, dtype=dtype)
    z = torch.full((2, width), torch.nan, dtype=dtype) if second else None
    fused.add_norm(PtxBackend(target), a, r, w1, y[:, :width], None if z is None else (w2, z), 1e-6)
    assert_rounds_alike(y[:, :width], fused.add_norm_ref(a, r, w1, w2, 1e-6)[0])
    assert torch.isnan(y[:, width:]).all()
    if z is not None and w2 is not None:
        assert_rounds_alike(z, fused.add_norm_ref(y[:, :width], None, w2, None, 1e-6)[0])


def test_add_norm_in_place() -> None:
    stream, branch, w1, w2 = draw(3, 96), draw(3, 96, seed=1), draw(96, seed=2), draw(96, seed=3)
    expected, _ = fused.add_norm_ref(branch, stream, w1, w2, 1e-6)
    fused.add_norm(PtxBackend(90), branch, stream, w1, stream, (w2, torch.empty_like(stream)), 1e-6)
    assert_rounds_alike(stream, expected)


@by_target
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("sequences", "tokens", "heads", "head", "biased"),
    [(1, 1, 1, 8, False), (2, 7, 2, 96, True), (1, 5, 1, 128, True), (1, 33, 1, 8, False)],
)
def test_rope_attention(
    target: int, dtype: torch.dtype, sequences: int, tokens: int, heads: int, head: int, biased: bool
) -> None:
    rows = sequences * tokens
    qkv = draw(rows, 3 * heads * head + 8, dtype=dtype)[:, : 3 * heads * head]
    bias = draw(2, heads, head, seed=1, dtype=dtype) if biased else None
    rotation = fused.rotation_table(tokens, head, 50000.0)
    out = torch.full((rows, heads * head + 8), torch.nan, dtype=dtype)
    fused.rope_attention(PtxBackend(target), qkv, bias, rotation, out[:, : heads * head], heads, tokens)
    expected = fused.rope_attention_ref(qkv, bias, rotation, heads, tokens)
    difference = (out[:, : heads * head].float() - expected.float()).abs().max()
    assert difference <= 2 * spacing(dtype) * expected.float().abs().max()
    assert torch.isnan(out[:, heads * head :]).all()


@by_target
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 264)])
def test_swiglu(target: int, dtype: torch.dtype, rows: int, width: int) -> None:
    gate_up = draw(rows, 2 * width, dtype=dtype) * 4
    out = torch.full((rows, width), torch.nan, dtype=dtype)
    fused.swiglu(PtxBackend(target), gate_up, out)
    assert_rounds_alike(out, fused.swiglu_ref(gate_up))


@by_target
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantize(target: int, dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, (48, 224)).astype(np.int8)
    packed = torch.from_numpy(pack_w4(codes))
    for group in (32, 96, -1):
        groups = 1 if group == -1 else -(-224 // group)
        scales = torch.from_numpy(rng.uniform(0.5, 2.0, (groups, 48)).astype(np.float32)).to(scale_dtype)
        out = torch.full((48, 224), torch.nan, dtype=dtype)
        for levels in (None, TABLE):
            product = Product(out, packed, scales, None, None, 224, group, levels=levels)
            launch_dequantize(PtxBackend(target), product, out)
            assert torch.equal(out, dequantize_packed(product).to(dtype))


@pytest.mark.parametrize(
    ("variant", "target"),
    [
        (Variant("bf16", 1, 3, 4), 80),
        (Variant("fp16", 1, 0, 4), 80),
        (Variant("bf16", 1, 0, 4), 90),
        (Variant("fp16-table", 1, 3, 4), 80),
        (Variant("bf16-table", 1, 0, 4), 90),
    ],
)
def test_the_proof_at_the_first_call_holds(variant: Variant, target: int) -> None:
    prove(variant, PtxBackend(target))


# ---- whole steps ------------------------------------------------------------------------------------------------


def rollout_check(target: int, sequences: int, tokens: int, n_steps: int) -> None:
    model = huginn_like(quantized=True)
    parts = LoopParts.from_model(model)
    backend = PtxBackend(target)
    runner = RolloutRunner(parts, backend)
    state, embedding = draw(sequences, tokens, WIDTH), draw(sequences, tokens, WIDTH, seed=1)
    exact = exact_rollout(model, state, embedding, n_steps)
    error = relative(runner.run(state, embedding, n_steps), exact)
    assert error < 1.25 * relative(reference_rollout(parts, state, embedding, n_steps), exact)
    assert backend.launches["loopq_w4a16_gemm"] == n_steps * 9
    assert backend.launches.total() == n_steps * (9 + 1 + 2 * 4)


@by_target
def test_a_step_of_the_rollout_runner(target: int) -> None:
    rollout_check(target, sequences=1, tokens=3, n_steps=1)


@pytest.mark.slow
@by_target
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (1, 7), (2, 3)])
def test_rollouts(target: int, sequences: int, tokens: int) -> None:
    rollout_check(target, sequences, tokens, n_steps=3)


@by_target
@pytest.mark.parametrize("n_paths", [4, 64])
def test_paths_of_a_beam(target: int, n_paths: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, backend = searched(30, n_paths, bits=3, group_size=16), PtxBackend(target)
    monkeypatch.setattr(beam, "kernels", lambda device: backend)
    assert torch.equal(searched(30, n_paths, bits=3, group_size=16), wanted)
    assert backend.launches == {"loopq_beam": 1}


@by_target
@pytest.mark.parametrize(
    ("d", "grid"),
    [
        (48, {"bits": 3, "group_size": 16}),
        (40, {"bits": 4, "group_size": 32, "levels": "uneven", "scale_dtype": "bfloat16"}),
    ],
)
def test_descents(target: int, d: int, grid: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    s, codes, theirs = rounded(d, d == 48, **grid)
    ours, backend = copy.deepcopy(theirs), PtxBackend(target)
    wanted = descent.change_codes(theirs, s, codes, 30)
    descent.change_scales(theirs, s, codes)
    monkeypatch.setattr(descent, "kernels", lambda device: backend)
    assert torch.equal(descent.change_codes(ours, s, codes, 30), wanted)
    descent.change_scales(ours, s, codes)
    assert torch.equal(ours.steps, theirs.steps)
    assert torch.equal(ours.scale, theirs.scale)
    torch.testing.assert_close(ours.gradient, theirs.gradient, rtol=1e-10, atol=1e-11)


@by_target
def test_every_kernel_is_understood(target: int) -> None:
    """Also code that no test above runs: an unknown instruction, modifier or operand is an error."""
    defines = {
        "w4a16_gemm.cu": Variant("fp16", 4, 2, 4, "bf16").defines,
        "w4a16_tiled.cu": TiledVariant("fp16", 2, 2, 4, "bf16").defines,
        "fused_ops.cu": ("-DLQ_IO=Bf16Io",),
        "beam.cu": ("-DLQ_PATHS=16",),
        "descent.cu": ("-DLQ_CODES=1",),
        "w4_dequantize.cu": ("-DLQ_FLOAT16=1", "-DLQ_TABLE=1"),
    }
    understood = set()
    for file, given in defines.items():
        for name, code in kernels.programs(kernels.ptx_text(file, given, target), target).items():
            code.understand()
            understood.add(name)
    entries = {name for text in kernel_sources().values() for name in re.findall(r"\b(loopq_\w+)\(\n", text)}
    assert understood == entries
