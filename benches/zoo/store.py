"""Write a small model as a folder that loopq's loader opens."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn


def save_model(model: nn.Module, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write ``model.safetensors`` and ``config.json`` into `folder`, each by rename.

    Parameters
    ----------
    model : nn.Module
        One of `benches.zoo.models`.
    folder : path
        Made if it is absent.
    dtype : torch.dtype, optional
        Storage type; the weights as they are when absent. The stored weights are the model: load them back
        before measuring anything.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Each parameter once, a tied one under its first name.
    tensors = {name: p.detach().to(dtype or p.dtype).contiguous() for name, p in model.named_parameters()}
    with tempfile.TemporaryDirectory(dir=folder) as tmp:
        part = Path(tmp) / "model.safetensors"
        save_file(tensors, part, metadata={"model_type": model.config.model_type})
        text = Path(tmp) / "config.json"
        text.write_text(json.dumps(model.config.to_dict(), indent=2) + "\n", encoding="utf-8")
        part.replace(folder / part.name)
        text.replace(folder / text.name)
