"""Every kernel compiles for sm_80 and sm_90 without spills; needs NVRTC, no GPU and no driver."""

from __future__ import annotations

import re

import pytest

from loopq.quantizers.cuda.beam import POWERS
from loopq.quantizers.cuda.sources import kernel_sources, translation_unit
from loopq.runtime.cuda import plan, tiled
from loopq.runtime.cuda.plan import Variant
from loopq.runtime.cuda.tiled import TiledVariant
from tests.support.cuda import nvrtc, sass
from tests.support.marks import slow_unless

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(
        nvrtc.library() is None,
        reason="NO NVRTC: the CUDA kernels are NOT compiled here; install the extra cuda12 or cuda13",
    ),
]

# Registers a block of `threads` may use per thread, of the 65,536 of a multiprocessor.
LIMIT = {512: 128, 256: 255}


def variants() -> list[Variant]:
    """Every kind of code, not every combination: other ring depths are compiled for one fold only."""
    listed = [
        Variant(activation, token_tiles, fold, 4)
        for activation in ("bf16", "fp16")
        for token_tiles in (1, 2, 4)
        for fold in (0, 1, 2, 3)
        if activation == "bf16" or (fold, token_tiles) == (3, 4)
    ]
    listed += [Variant("bf16", 1, 3, stages) for stages in (2, 6)]
    listed += [Variant("bf16-table", tiles, fold, 4) for tiles in (1, 2, 4) for fold in (0, 1, 2, 3)]
    listed += [Variant("fp16-table", 4, 0, 4, "fp16")]
    return listed + [Variant("bf16", tiles, 3, 4, scales) for tiles in (1, 4) for scales in ("bf16", "fp16")]


def _quick(case: tuple[str, Variant | TiledVariant]) -> bool:
    """One fold, bfloat16 and the depth that is planned."""
    architecture, variant = case
    usual = variant.activation.startswith("bf16") and variant.stages == 4 and variant.fold == 2
    return usual and architecture == "sm_90"


@pytest.mark.parametrize(
    ("architecture", "variant"),
    slow_unless(
        _quick,
        [(architecture, variant) for architecture in ("sm_80", "sm_90") for variant in variants()],
    ),
    ids=str,
)
def test_gemm_compiles_without_spills(architecture: str, variant: Variant) -> None:
    options = [f"-arch={architecture}", "-std=c++17", *variant.defines]
    cubin = nvrtc.compile_cubin(translation_unit("w4a16_gemm.cu"), "w4a16_gemm.cu", options)
    used = nvrtc.resources(cubin, "loopq_w4a16_gemm")
    assert used.stack_bytes == 0, f"{variant} for {architecture} spills {used}"
    assert used.registers <= LIMIT[variant.threads], f"{variant} for {architecture} needs {used.registers}"


TILED = [
    TiledVariant("bf16", warps, fold, 4, scales)
    for warps in (1, 2)
    for fold in (0, 1, 2)
    for scales in ("f32", "bf16")
]
TILED += [
    TiledVariant("bf16-table", warps, fold, 4, scales)
    for warps in (1, 2)
    for fold in (0, 1, 2)
    for scales in ("f32", "bf16")
]
TILED += [
    TiledVariant("fp16", warps, fold, stages, "fp16")
    for warps, fold, stages in ((1, 2, 6), (2, 0, 4), (2, 2, 2))
]


@pytest.mark.parametrize(
    ("architecture", "variant"),
    slow_unless(
        _quick, [(architecture, variant) for architecture in ("sm_80", "sm_90") for variant in TILED]
    ),
    ids=str,
)
def test_the_tiled_product_compiles_without_spills(architecture: str, variant: TiledVariant) -> None:
    options = [f"-arch={architecture}", "-std=c++17", *variant.defines]
    cubin = nvrtc.compile_cubin(translation_unit("w4a16_tiled.cu"), "w4a16_tiled.cu", options)
    used = nvrtc.resources(cubin, "loopq_w4a16_tiled")
    assert used.stack_bytes == 0, f"{variant} for {architecture} spills {used}"
    assert used.registers <= LIMIT[variant.threads], f"{variant} for {architecture} needs {used.registers}"


needs_disassembler = pytest.mark.skipif(
    sass.disassembler() is None, reason="no nvdisasm: install it, or triton, to count instructions"
)


@needs_disassembler
@pytest.mark.parametrize("fold", slow_unless(lambda fold: fold == 0, tiled._STAGE_SLOTS))
def test_the_planner_knows_what_a_stage_of_many_tokens_costs(fold: int) -> None:
    for warps in (1, 2):
        options = ["-arch=sm_90", "-std=c++17", *TiledVariant("bf16", warps, fold, 4, "bf16").defines]
        cubin = nvrtc.compile_cubin(translation_unit("w4a16_tiled.cu"), "w4a16_tiled.cu", options)
        counted = sass.stage_slots(sass.disassemble(cubin))
        assert counted["HMMA"] == 64, "the loop that was counted is not the main loop"
        assert counted.total() == pytest.approx(tiled._STAGE_SLOTS[fold], rel=0.1), counted


@needs_disassembler
@pytest.mark.parametrize("fold", slow_unless(lambda fold: fold == 3, plan._STAGE_SLOTS))
def test_the_planner_knows_what_a_stage_costs(fold: int) -> None:
    """Other compilers may do a little better or worse; a main loop that grew by a tenth is a change of the kernel."""
    for token_tiles, planned in plan._STAGE_SLOTS[fold].items():
        variant = Variant("bf16", token_tiles, fold, 6 if token_tiles == 1 else 4, "bf16")
        options = ["-arch=sm_90", "-std=c++17", *variant.defines]
        cubin = nvrtc.compile_cubin(translation_unit("w4a16_gemm.cu"), "w4a16_gemm.cu", options)
        counted = sass.stage_slots(sass.disassemble(cubin))
        assert counted["HMMA"] == 16 * token_tiles, "the loop that was counted is not the main loop"
        assert counted.total() == pytest.approx(planned, rel=0.1), f"{variant}: {counted}"


@needs_disassembler
@pytest.mark.slow
@pytest.mark.parametrize("fold", [0, 1, 2, 3])
def test_no_copy_has_a_descriptor_in_an_odd_register(fold: int) -> None:
    """NVRTC 13 compiles some predicated copies to an illegal instruction: a descriptor takes a pair of registers."""
    sources: list[tuple[str, Variant | TiledVariant]] = [
        ("w4a16_gemm.cu", Variant("bf16", tiles, fold, stages, "bf16"))
        for tiles in (1, 2, 4)
        for stages in (3, 6)
    ]
    sources += [
        ("w4a16_tiled.cu", TiledVariant("bf16", warps, min(fold, 2), stages, "bf16"))
        for warps in (1, 2)
        for stages in (2, 3, 4, 5, 6)
        if fold < 3
    ]
    for name, variant in sources:
        options = ["-arch=sm_90", "-std=c++17", *variant.defines]
        code = sass.disassemble(nvrtc.compile_cubin(translation_unit(name), name, options))
        assert "desc[UR" in code, "no descriptor was found: the disassembler writes them in another way"
        assert re.search(r"desc\[UR\d*[13579]\]", code) is None, variant


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_small_kernels_compile_without_spills(architecture: str) -> None:
    entries = {
        ("w4_dequantize.cu", f"-DLQ_FLOAT16={half}", f"-DLQ_TABLE={table}"): ("loopq_w4_dequantize",)
        for half in (0, 1)
        for table in (0, 1)
    }
    entries |= {("beam.cu", f"-DLQ_PATHS={paths}"): ("loopq_beam",) for paths in POWERS}
    entries |= {("descent.cu", f"-DLQ_CODES={codes}"): ("loopq_descent",) for codes in (0, 1)}
    for (name, *defines), kernels in entries.items():
        cubin = nvrtc.compile_cubin(
            translation_unit(name), name, [f"-arch={architecture}", "-std=c++17", *defines]
        )
        for kernel in kernels:
            used = nvrtc.resources(cubin, kernel)
            # A division that is rounded right is a call, which may keep some registers of its caller.
            divides = name in ("beam.cu", "descent.cu")
            assert used.stack_bytes <= 16 * divides, f"{kernel} for {architecture} spills {used}"
            assert used.registers <= 64, f"{kernel} for {architecture} needs {used.registers}"


def test_every_kernel_file_is_compiled_here() -> None:
    products = {"w4a16_gemm.cu", "w4a16_tiled.cu", "w4_dequantize.cu"}
    compiled = products | {"beam.cu", "descent.cu"}
    assert {name for name in kernel_sources() if name.endswith(".cu")} == compiled


def test_a_spill_would_be_seen() -> None:
    """The check above reads the right field: 32 warps of the widest variant need a stack."""
    source = translation_unit("w4a16_gemm.cu")
    defines = [d for d in Variant("bf16", 4, 0, 4).defines if "THREADS" not in d]
    cubin = nvrtc.compile_cubin(source, "w4a16_gemm.cu", ["-arch=sm_90", *defines, "-DLQ_THREADS=1024"])
    assert nvrtc.resources(cubin, "loopq_w4a16_gemm").stack_bytes > 0


def test_errors_name_the_file_and_line() -> None:
    source = translation_unit("w4a16_gemm.cu").replace("kTileBytes = 512;", "kTileBytes = no_such_name;")
    with pytest.raises(RuntimeError, match=r"kernels/w4a16\.cuh\(\d+\): error"):
        nvrtc.compile_cubin(source, "w4a16_gemm.cu", ["-arch=sm_80", *Variant("bf16", 1, 2, 4).defines])
