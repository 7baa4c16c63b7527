"""Limits of vLLM and SGLang, which join matrices."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from loopq.formats.rules import LIMITS, Config, Layers, Rule, grid_of, where

#: Projections that engines put into one matrix, which has one scheme.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def _unlike_siblings(layers: Layers, config: Config, dense: Collection[str]) -> Iterable[str]:
    """Projections with another grid than those they are fused with, or dense ones beside quantized ones."""
    for name, layer in layers.items():
        module, _, last = name.removesuffix(".weight").rpartition(".")
        for family in _FUSED:
            if last in family:
                others = [layers.get(f"{module}.{part}.weight") for part in family]
                if any(other is None or grid_of(other) != grid_of(layer) for other in others):
                    yield name


LIMITS.register("serving")((
    Rule(
        ("vllm",), ("gptq",), "GPTQ of 2 or 3 bits", "--format compressed-tensors, or 4 or 8 bits",
        "vLLM 0.32 on a CPU: run, both refused when the configuration is read", where(lambda x: x.grid.bits < 4),
    ),
    Rule(
        ("vllm",), ("gptq",), "GPTQ of IQuest-Coder-Loop: its class does not name what it fuses",
        "--format compressed-tensors", "vLLM 0.32 on a CPU: run (KeyError 'layers.0.mlp.gate_up_proj.qweight')",
        where(lambda x: True), ("iquest",),
    ),
    Rule(
        ("vllm", "sglang"), ("compressed-tensors", "gptq", "modelopt"),
        "HRM-Text under transformers' names: gate, q, k and v are one matrix there, and so are gate and up",
        "--names published", "vLLM 0.33: source read", where(lambda x: True), ("hrm_text",), (None,),
    ),
    Rule(
        ("vllm", "sglang"), ("compressed-tensors", "gptq", "modelopt"),
        "q, k and v, or gate and up, of unlike bits, groups, symmetry or NVFP4 powers, or some of them dense: one "
        "matrix there",
        "one --layer setting for all of them, and --include or --exclude them together",
        "vLLM and SGLang 2026-08: source read; seen by others as AssertionError in load_merged_column_weight",
        # Under published names joined rows have one grid.
        _unlike_siblings, (), (None,),
    ),
))  # fmt: skip
