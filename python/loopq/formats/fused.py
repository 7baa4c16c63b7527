"""Modules of a model's published files that hold several of the model's own, by rows."""

from __future__ import annotations

#: HRM-Text: what transformers splits at loading, and vLLM and SGLang take as one matrix.
HRM_TEXT = {
    "attn.gqkv_proj": ("self_attn.gate_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
