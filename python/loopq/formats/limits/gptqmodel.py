"""Limits of GPTQModel."""

from __future__ import annotations

from loopq.formats.rules import LIMITS, Rule, named, where

_GPTQ = ("gptq", "gptq_v2")
LIMITS.register("gptqmodel")((
    Rule(
        ("gptqmodel",), _GPTQ, "o_proj of HRM-Text by the name of its published files, quantized or dense",
        "--format compressed-tensors, or the native checkpoint",
        "GPTQModel 7.7: run (\"Missing required quantized weights\", or left as initialised)",
        lambda layers, config, dense: [] if any(".self_attn.o_proj." in n for n in layers) else list(layers)[:1],
        ("hrm_text",), silent=True,
    ),
    Rule(
        ("gptqmodel",), _GPTQ, "groups of fewer than 16 columns", "a group size of 16 or more that divides in_features",
        "GPTQModel 7.7: run (groups of 4 refused, of 32 taken)", where(lambda x: 0 < x.grid.group_size < 16),
    ),
    Rule(
        ("gptqmodel",), _GPTQ, "quantized layers outside numbered blocks: left as initialised, without an error",
        "--exclude them, or load by transformers and optimum",
        "GPTQModel 7.7: run", named(r"^(?!.*\.\d+\.)"), silent=True,
    ),
))  # fmt: skip
