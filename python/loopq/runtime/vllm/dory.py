"""Dory in vLLM: layers on unit spheres, a middle section that runs several times, codes in any linear layer.

Modules have the names of the published files, in which attention and MLP of a layer are two blocks. From 0.33 on vLLM
has a class of its own, which `loopq.runtime.vllm.packed` extends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaModel

from loopq.errors import ConfigError
from loopq.formats.limits.plugin import refuse_config
from loopq.runtime.vllm.loops import BY_TOKEN, Causal, LoopedBlocks, table


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1."""
    full = x.float()
    return (full * torch.rsqrt(full.pow(2).sum(-1, keepdim=True) + 1e-6)).type_as(x)


def _vector(width: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(width), requires_grad=False)


class _Attention(nn.Module):
    """Attention of unit queries and keys, each channel of a query scaled; a gate behind it."""

    def __init__(self, vllm_config: VllmConfig, i: int, prefix: str) -> None:
        super().__init__()
        config, quant_config = vllm_config.model_config.hf_config, vllm_config.quant_config
        n, n_kv, self.head = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        width, kind = n * self.head, config.layer_types[i]
        take: dict[str, Any] = {"bias": False, "quant_config": quant_config}
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, self.head, n, n_kv, prefix=f"{prefix}.qkv_proj", **take
        )
        self.g_proj = ColumnParallelLinear(config.hidden_size, width, prefix=f"{prefix}.g_proj", **take)
        self.o_proj = RowParallelLinear(width, config.hidden_size, prefix=f"{prefix}.o_proj", **take)
        self.sqk, self.s_gate = _vector(width), _vector(width)
        self.widths = [width, n_kv * self.head, n_kv * self.head]
        self.scales = [s / config.initializer_range for s in (self.head**0.5, config.hidden_size**0.25)]
        self.rotary = get_rope(
            self.head,
            config.max_position_embeddings,
            is_neox_style=True,
            rope_parameters=config.rope_parameters[kind],
        )
        self.attn = Attention(
            n,
            self.head,
            self.head**-0.5,
            num_kv_heads=n_kv,
            cache_config=vllm_config.cache_config,
            quant_config=quant_config,
            per_layer_sliding_window=config.sliding_window if kind == "sliding_attention" else None,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x)[0].split(self.widths, -1)
        q, k = (_unit(part.unflatten(-1, (-1, self.head))).flatten(-2) for part in (q, k))
        q, k = self.rotary(positions, q, k)
        scale, gate = (s * by for s, by in zip((self.sqk, self.s_gate), self.scales, strict=True))
        mixed = self.attn(q * scale.square(), k, v)
        mixed = mixed * torch.sigmoid(self.g_proj(x)[0] * gate.square())
        out: Tensor = self.o_proj(_unit(mixed))[0]
        return out


class _MLP(nn.Module):
    """Gated MLP whose gates and values are scaled; its hidden states have length 1."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        width, wide = config.hidden_size, config.intermediate_size
        take: dict[str, Any] = {"bias": False, "quant_config": vllm_config.quant_config}
        self.gate_up_proj = MergedColumnParallelLinear(
            width, [wide] * 2, prefix=f"{prefix}.gate_up_proj", **take
        )
        self.down_proj = RowParallelLinear(wide, width, prefix=f"{prefix}.down_proj", **take)
        self.suv_gate, self.suv_up = _vector(wide), _vector(wide)
        self.scale = width**0.5

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)[0].chunk(2, -1)
        gate, up = gate * (self.suv_gate * self.scale), up * (self.suv_up * self.scale)
        out: Tensor = self.down_proj(_unit(nn.functional.silu(gate) * up))[0]
        return out


class _Block(nn.Module):
    """``x = norm(x); x += rate * (norm(mixer(x)) - x)``."""

    def __init__(self, vllm_config: VllmConfig, number: int, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        i, second = divmod(number, 2)
        self.mixer = (
            _MLP(vllm_config, f"{prefix}.mixer") if second else _Attention(vllm_config, i, f"{prefix}.mixer")
        )
        self.rate = "mlp_alpha" if second else "attn_alpha"
        self.register_parameter(self.rate, _vector(config.hidden_size))
        self.scale = config.ngpt_alpha_init / config.initializer_range

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        x = _unit(x)
        rate = (getattr(self, self.rate) * self.scale).abs()
        return x + rate * (_unit(self.mixer(positions, x)) - x)


@support_torch_compile(dynamic_arg_dims=BY_TOKEN)
class DoryModel(nn.Module):
    """Blocks before the loop give `e`; ``x = blocks(norm(x) + norm(e))`` in every loop; blocks after it, norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        refuse_config(vars(config))
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            raise ConfigError("Dory: a norm is over all heads of a layer: use --tensor-parallel-size 1")
        self.embeddings = table(vllm_config, config.hidden_size, f"{prefix}.embeddings")
        n, name = 2 * config.num_hidden_layers, f"{prefix}.layers"
        self.first, self.n_loop = 2 * config.n_input_layers, 2 * config.n_recurrent_layers
        self.end = self.first + self.n_loop * config.n_recurrent_loops
        order = list(range(n))
        order[self.first : self.first + self.n_loop] *= config.n_recurrent_loops
        blocks = nn.ModuleList(_Block(vllm_config, i, f"{name}.{i}") for i in range(n))
        self.layers = LoopedBlocks(blocks, order, name, n, vllm_config)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        for i, block in enumerate(self.layers):
            if i == self.first:
                entry = _unit(x)
            if self.first <= i < self.end and (i - self.first) % self.n_loop == 0:
                x = _unit(x) + entry
            x = block(positions, x)
        return _unit(x)


class Dory(Causal):
    """Dory1.0-4B. Every loop has its own key/value cache."""

    place, kind, table = "backbone", DoryModel, "embeddings"
    hf_to_vllm_mapper = LlamaModel.hf_to_vllm_mapper
    packed_modules_mapping = LlamaForCausalLM.packed_modules_mapping

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.lm_head.logit_scale = _vector(self.config.vocab_size)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits (n_tokens, vocabulary), each with its own scale."""
        logits = super().compute_logits(hidden_states)
        scale = self.lm_head.logit_scale.float() / self.config.initializer_range
        return None if logits is None else logits.float() * scale
