"""A dense decoder whose layers a config lets run several times."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def save_dense(place: Path) -> Path:
    """Save an untrained Llama of five layers."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=5, **SIZES)).save_pretrained(place)
    return place
