"""Folders of systems whose class comes with the checkpoint: a small class of the same shape stands for the code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

ROOT = Path(__file__).parents[2]
#: transformers looks for packages that a file of code imports by name, so these are imported by text.
CODE = """
import importlib
import sys

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class TinyConfig(PretrainedConfig):
    model_type = "{kind}"


class TinyForCausalLM(PreTrainedModel):
    config_class = TinyConfig
    {ties}

    def __init__(self, config):
        super().__init__(config)
        sys.path += [p for p in ({root!r},) if p not in sys.path]
        build = importlib.import_module("benches.zoo.models").build
        inner = build(config.zoo)
        if any(buffer.is_meta for buffer in inner.buffers()):
            # transformers gives no values to what no file holds.
            with torch.device("cpu"):
                inner = build(config.zoo)
        object.__setattr__(self, "own", type(inner))
        for name, child in inner.named_children():
            setattr(self, name, child)
        for module in self.modules():
            if getattr(module, "config", None) is inner.config:
                module.config = config
        for name in dir(inner.config):
            value = getattr(inner.config, name)
            if not name.startswith("_") and not callable(value) and not hasattr(config, name):
                setattr(config, name, value)
        # Buffers are no buffers here: transformers would empty those that no file holds.
        for name, value in {{**vars(inner), **inner._buffers}}.items():
            if name != "config" and name not in vars(torch.nn.Module()):
                object.__setattr__(self, name, value)
        self.post_init()

    def __getattr__(self, name):
        found = getattr(vars(self).get("own"), name, None)
        return super().__getattr__(name) if found is None else found.__get__(self)

    def _init_weights(self, module):
        pass

    def forward(self, input_ids=None, use_cache=None, **others):
        reads = self.own.forward.__code__.co_varnames
        given = {{name: value for name, value in others.items() if name in reads}}
        torch.manual_seed(0)
        if "past_key_values" not in reads or given.get("past_key_values") is not None:
            found = self.own.forward(self, input_ids, **given)
            return CausalLMOutputWithPast(logits=found.logits) if hasattr(found, "logits") else found
        past, logits = None, []
        for token in input_ids.split(1, 1):
            found = self.own.forward(self, token, **{{**given, "past_key_values": past}})
            past = found.past_key_values
            logits.append(found.logits)
        return CausalLMOutputWithPast(logits=torch.cat(logits, 1))
"""
#: Settings of a published config.json that GGUF reads, from those of the small class.
PUBLISHED = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads", "max_position_embeddings": "block_size", "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_base",
}  # fmt: skip


def save(model: nn.Module, folder: Path) -> None:
    """Write a small model of `benches.zoo` as a folder with code of its own, under the published names."""
    small: Any = model.config
    zoo = small.to_dict()
    kind = zoo["model_type"].removeprefix("loopq-zoo-")
    file = f"modeling_{kind}"
    published = {name: zoo[small_name] for name, small_name in PUBLISHED.items() if small_name in zoo}
    state = model.state_dict()
    first: dict[int, str] = {}
    ties = {n: s for n, t in state.items() if (s := first.setdefault(t.data_ptr(), n)) != n}
    config = {
        **zoo, **published, "model_type": kind, "zoo": zoo, "tie_word_embeddings": bool(ties),
        "dtype": "float32",
        "architectures": [f"{ {'iquest': 'IQuestLoopCoder'}.get(kind, kind.capitalize()) }ForCausalLM"],
        "auto_map": {"AutoConfig": f"{file}.TinyConfig", "AutoModelForCausalLM": f"{file}.TinyForCausalLM"},
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    tied = f"_tied_weights_keys = {ties!r}" if ties else ""
    (folder / f"{file}.py").write_text(CODE.format(kind=kind, root=str(ROOT), ties=tied), "utf-8")
    tensors = {name: value.contiguous() for name, value in state.items() if name not in ties}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
