"""HRM-Text: transformers splits matrices at loading, and vLLM and SGLang take them as one."""

from __future__ import annotations

from loopq.formats.layouts import LAYOUTS, FileLayout, Parts

PARTS: Parts = {
    "attn.gqkv_proj": ("self_attn.gate_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
LAYOUTS.register("hrm_text")(FileLayout(renamed=((r"\.attn\.o_proj$", ".self_attn.o_proj"),), parts=PARTS))
