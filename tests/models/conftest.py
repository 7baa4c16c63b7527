"""A folder with its own model code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.remote import REMOTE


@pytest.fixture
def remote_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with its own code, written by hand."""
    from safetensors.torch import save_file

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "remote"
    folder.mkdir()
    (folder / "modeling_loop.py").write_text(REMOTE)
    config = {
        "model_type": "loopq_test_loop",
        "architectures": ["LoopForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_loop.LoopConfig",
            "AutoModelForCausalLM": "modeling_loop.LoopForCausalLM",
        },
        "hidden_size": 16,
        "num_loops": 3,
        "vocab_size": 64,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.randn(64, 16),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(16, 16),
        "lm_head.weight": torch.randn(64, 16),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
