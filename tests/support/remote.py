"""A folder with its own model code."""

from __future__ import annotations

from pathlib import Path

from tests.support.systems import CASES, build

# A published class in small: its own weight initialisation, and rotary frequencies that no checkpoint holds.
REMOTE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class LoopConfig(PretrainedConfig):
    model_type = "loopq_test_loop"

    def __init__(self, hidden_size=16, num_loops=3, vocab_size=64, **kwargs):
        self.hidden_size, self.num_loops, self.vocab_size = hidden_size, num_loops, vocab_size
        super().__init__(**kwargs)


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q_proj = nn.Linear(d, d, bias=False)
        self.register_buffer("inv_freq", 1.0 / 10.0 ** torch.arange(d).div(d), persistent=False)

    def forward(self, x):
        return self.q_proj(x * self.inv_freq)


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.self_attn = Attention(d)


class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config.hidden_size)])


class LoopForCausalLM(PreTrainedModel):
    config_class = LoopConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = Inner(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.2)

    def forward(self, input_ids, use_cache=None):
        x = self.model.embed_tokens(input_ids)
        for _ in range(self.config.num_loops):
            x = x + self.model.layers[0].self_attn(x)
        return CausalLMOutputWithPast(logits=self.lm_head(x))
"""


def _saved(name: str, tmp_path: Path) -> Path:
    model = build(CASES[name])
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"
