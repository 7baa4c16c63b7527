"""Dory: attention and MLP of a layer have numbers of their own in its files."""

from __future__ import annotations

import re

from loopq.formats.layouts import LAYOUTS, FileLayout


def _of_pairs(match: re.Match[str]) -> str:
    block = int(match[1])
    return f"layers.{block // 2}.{('self_attn', 'mlp')[block % 2]}."


LAYOUTS.register("dory")(
    FileLayout(
        renamed=(
            (r"^backbone\.(?=layers\.)", "model."),
            (r"layers\.(\d+)\.mixer\.", _of_pairs),
            (r"\.self_attn\.g_proj$", ".self_attn.gate_proj"),
        )
    )
)
