"""A looped model as code beside a checkpoint: adapter, two layers, exit gate and four loops."""

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class LoopConfig(PretrainedConfig):
    model_type = "interop_loop"

    def __init__(self, hidden_size=64, inner_size=96, num_layers=2, num_loops=4, vocab_size=96, **kwargs):
        self.hidden_size, self.inner_size, self.num_layers = hidden_size, inner_size, num_layers
        self.num_loops, self.vocab_size = num_loops, vocab_size
        self.num_hidden_layers = num_layers
        super().__init__(**kwargs)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.up_proj = nn.Linear(config.hidden_size, config.inner_size, bias=True)
        self.down_proj = nn.Linear(config.inner_size, config.hidden_size, bias=False)

    def forward(self, x):
        return x + self.down_proj(torch.nn.functional.silu(self.up_proj(self.norm(x))))


class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.adapter = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-6)


class LoopForCausalLM(PreTrainedModel):
    config_class = LoopConfig
    _no_split_modules = ["Block"]

    def __init__(self, config):
        super().__init__(config)
        self.model = Inner(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(std=0.2)

    def forward(self, input_ids, use_cache=None, **kwargs):
        inner = self.model
        embeds = inner.embed_tokens(input_ids)
        state = torch.zeros_like(embeds)
        for _ in range(self.config.num_loops):
            state = inner.adapter(torch.cat((state, embeds), -1))
            for layer in inner.layers:
                state = layer(state)
            state = inner.norm(state)
            state = state * (1 + torch.sigmoid(inner.early_exit_gate(state)))
        return CausalLMOutputWithPast(logits=self.lm_head(state))
