"""A dense decoder with layers that a config runs several times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from loopq.systems import find_system
from loopq.systems.base import LoopedSystem

SIZES = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def save_dense(place: Path) -> Path:
    """Save an untrained Llama of five layers."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=5, **SIZES)).save_pretrained(place)
    return place


def looped(kind: str, **settings: Any) -> LoopedSystem:
    """A model of transformers with random weights, norms and biases; layers 1 and 2 of 4 run three times."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, **settings,
    )  # fmt: skip
    config.looped_layers = [1, 3, 3]
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return find_system(model)


def fp8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A layer's weight as one block of FP8 and its scale."""
    if not name.endswith("proj.weight"):
        return {name: weight}
    scale = weight.abs().max() / 448
    return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.reshape(1, 1)}


def change(
    folder: Path, tensors: Callable[[str, torch.Tensor], dict[str, torch.Tensor]], **config: Any
) -> None:
    """Change a folder's tensors one by one, and entries of its config.json."""
    file, new = folder / "model.safetensors", dict[str, torch.Tensor]()
    for name, tensor in load_file(file).items():
        new |= tensors(name, tensor)
    save_file(new, file, {"format": "pt"})
    old = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(old | config))
