"""Ouro, Huginn, R-Llama and dense decoders with a loop, in vLLM."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP, LlamaModel
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix

from loopq.errors import ConfigError
from loopq.formats.limits.plugin import embedding_is_scaled, refuse_config
from loopq.layers.loop_spec import LOOP, layer_order
from loopq.runtime.vllm.loops import BY_TOKEN, Causal, LoopedBlocks, Weights, complete, table
from loopq.systems.base import Batch
from loopq.systems.raven import initial_noise


class OuroLayer(nn.Module):
    """``x += norm(attn(norm(x))); x += norm(mlp(norm(x)))``."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config, quant_config = vllm_config.model_config.hf_config, vllm_config.quant_config
        self.self_attn = LlamaAttention(
            config,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.max_position_embeddings,
            quant_config=quant_config,
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix}.self_attn",
        )
        self.mlp = LlamaMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            quant_config=quant_config,
            prefix=f"{prefix}.mlp",
        )
        for name in ("input_layernorm", "input_layernorm_2"):
            self.add_module(name, RMSNorm(config.hidden_size, config.rms_norm_eps))
            self.add_module(f"post_attention{name[5:]}", RMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        x = x + self.input_layernorm_2(self.self_attn(positions, self.input_layernorm(x)))
        out: Tensor = x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))
        return out


@support_torch_compile(dynamic_arg_dims=BY_TOKEN)
class OuroModel(nn.Module):
    """Embedding, then a configured number of loops, each with all layers and the norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embed_tokens = table(vllm_config, config.hidden_size, f"{prefix}.embed_tokens")
        n, name = config.num_hidden_layers, f"{prefix}.layers"
        layers = nn.ModuleList(OuroLayer(vllm_config, f"{name}.{i}") for i in range(n))
        order = list(range(n)) * config.total_ut_steps
        self.layers = LoopedBlocks(layers, order, name, n, vllm_config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.n_layers = n

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for i, layer in enumerate(self.layers, 1):
            x = layer(positions, x)
            if i % self.n_layers == 0:
                x = self.norm(x)
        return x


class Ouro(Causal):
    """Ouro-1.4B and Ouro-2.6B. Tokens are read from the last loop. The exit gate is not used."""

    place, kind, table = "model", OuroModel, "embed_tokens"
    hf_to_vllm_mapper = LlamaModel.hf_to_vllm_mapper | WeightsMapper(
        orig_to_new_substr={"early_exit_gate": None}
    )
    packed_modules_mapping = LlamaForCausalLM.packed_modules_mapping


class RavenAttention(nn.Module):
    """Attention with one matrix for q, k and v. `rotary` rotates queries and keys by their positions."""

    def __init__(self, vllm_config: VllmConfig, prefix: str, slot: str, rotary: nn.Module) -> None:
        super().__init__()
        config, quant_config = vllm_config.model_config.hf_config, vllm_config.quant_config
        width, n, n_kv = config.n_embd, config.n_heads, config.num_key_value_heads
        head = width // n
        take: dict[str, Any] = {"bias": False, "quant_config": quant_config}
        self.Wqkv = QKVParallelLinear(width, head, n, n_kv, prefix=f"{prefix}.Wqkv", **take)
        self.proj = RowParallelLinear(width, width, prefix=f"{prefix}.proj", **take)
        n_heads, n_kv_heads = self.Wqkv.num_heads, self.Wqkv.num_kv_heads
        self.widths = [n_heads * head, n_kv_heads * head, n_kv_heads * head]
        self.qk_bias = None
        if getattr(config, "qk_bias", True):
            self.qk_bias = nn.Parameter(torch.zeros(2, 1, n_heads, head), requires_grad=False)
            self.qk_bias.weight_loader = _load_own_heads
        self.rotary = rotary
        self.attn = Attention(
            n_heads,
            head,
            head**-0.5,
            num_kv_heads=n_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=quant_config,
            prefix=slot,
        )

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        q, k, v = self.Wqkv(x)[0].split(self.widths, -1)
        if self.qk_bias is not None:
            q, k = (part + bias.flatten() for part, bias in zip((q, k), self.qk_bias, strict=True))
        q, k = self.rotary(positions, q, k)
        out: Tensor = self.proj(self.attn(q, k, v))[0]
        return out


def _load_own_heads(parameter: nn.Parameter, stored: Tensor) -> None:
    """Copy the biases of this machine's heads from the (2, 1, heads, head width) tensor."""
    n = parameter.shape[2]
    parameter.data.copy_(stored.narrow(2, n * get_tensor_model_parallel_rank(), n))


class RavenMLP(nn.Module):
    """Gated MLP. Gate and up share one matrix."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        width, wide = config.n_embd, config.intermediate_size
        take: dict[str, Any] = {"bias": False, "quant_config": vllm_config.quant_config}
        self.fc = MergedColumnParallelLinear(width, [wide] * 2, prefix=f"{prefix}.fc", **take)
        self.proj = RowParallelLinear(wide, width, prefix=f"{prefix}.proj", **take)
        self.gated = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(self.gated(self.fc(x)[0]))[0]
        return out


class RavenBlock(nn.Module):
    """Common parts of Huginn's and R-Llama's blocks: attention, MLP and norms."""

    n_norms: ClassVar[int]

    def __init__(self, vllm_config: VllmConfig, prefix: str, slot: str, rotary: nn.Module) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.attn = RavenAttention(vllm_config, f"{prefix}.attn", slot, rotary)
        self.mlp = RavenMLP(vllm_config, f"{prefix}.mlp")
        for i in range(1, self.n_norms + 1):
            self.add_module(f"norm_{i}", RMSNorm(config.n_embd, config.norm_eps))


class HuginnLayer(RavenBlock):
    """``x = norm_2(attn(norm_1(x)) + x)``, then ``x = norm_4(mlp(norm_3(x)) + x)``."""

    n_norms = 4

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        x = self.norm_2(self.attn(positions, self.norm_1(x)) + x)
        out: Tensor = self.norm_4(self.mlp(self.norm_3(x)) + x)
        return out


class RLlamaBlock(RavenBlock):
    """``x += attn(norm_1(x))``, then ``x += mlp(norm_2(x))``."""

    n_norms = 2

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        x = x + self.attn(positions, self.norm_1(x))
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


@support_torch_compile(dynamic_arg_dims=BY_TOKEN)
class RavenModel(nn.Module):
    """Prelude, noise, adapter and core blocks `mean_recurrence` times, coda, norm. Huginn adds a norm after the loop.

    Both models use the same class and ``model_type`` names. R-Llama is recognised by its unscaled embeddings.

    A token's initial state is noise drawn from its position, as in `loopq run` with seed 0. A text thus has the same
    logits in every batch.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        refuse_config(vars(config))
        initial = getattr(config, "init_values", None) or {}
        self.scale = float(initial.get("embed_scale", config.n_embd**0.5))
        self.huginn = embedding_is_scaled(vars(config))
        rope = {"rope_type": "default", "rope_theta": float(config.rope_base)} if self.huginn else None
        rotary = get_rope(
            config.n_embd // config.n_heads,
            config.max_position_embeddings,
            is_neox_style=not self.huginn,
            rope_parameters=rope or config.rope_parameters,
        )
        kind = HuginnLayer if self.huginn else RLlamaBlock
        counts = [config.n_layers_in_prelude, config.n_layers_in_recurrent_block, config.n_layers_in_coda]
        n_steps = config.mean_recurrence
        self.wte = table(vllm_config, config.n_embd, f"{prefix}.wte")
        self.adapter = ColumnParallelLinear(
            2 * config.n_embd,
            config.n_embd,
            bias=getattr(config, "bias", False),
            gather_output=True,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.adapter",
        )
        first = 0
        for part, n in zip(("prelude", "core_block", "coda"), counts, strict=True):
            blocks = nn.ModuleList(
                kind(vllm_config, f"{prefix}.{part}.{i}", f"slots.{first + i}.attn", rotary) for i in range(n)
            )
            if part == "core_block":
                blocks = LoopedBlocks(blocks, list(range(n)) * n_steps, "slots", sum(counts), vllm_config)
            self.add_module(part, blocks)
            first += n
        self.ln_f = RMSNorm(config.n_embd, config.norm_eps)
        self.n_core = counts[1]
        longest = vllm_config.model_config.max_model_len
        text = Batch(torch.zeros(1, longest, dtype=torch.long), (0,), by_token=True)
        std = float(initial.get("std", (2.0 / (5.0 * config.n_embd)) ** 0.5)) * self.scale
        noise = initial_noise(text, config.n_embd, std)[0].to(device=self.ln_f.weight.device)
        self.register_buffer("noise", noise.to(self.ln_f.weight.dtype), persistent=False)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        embedding = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        embedding = embedding * self.scale
        for block in self.prelude:
            embedding = block(positions, embedding)
        x = self.noise[positions]
        for i, block in enumerate(self.core_block):
            if i % self.n_core == 0:
                x = self.adapter(torch.cat((x, embedding), -1))[0]
            x = block(positions, x)
        if self.huginn:
            x = self.ln_f(x)
        for block in self.coda:
            x = block(positions, x)
        out: Tensor = self.ln_f(x)
        return out


class RavenLM(Causal):
    """Huginn-3.5B and R-Llama. The depth is `mean_recurrence`, without adaptive exit."""

    place, kind, table = "transformer", RavenModel, "wte"
    hf_to_vllm_mapper = WeightsMapper(orig_to_new_substr={"freqs_cis": None})
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}


class _Looped:
    """A dense decoder of vLLM with layers that run several times (`loopq.systems.looped`)."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ConfigError("a loop is not divided among pipeline stages: use --tensor-parallel-size")
        inner: Any = self.model  # type: ignore[attr-defined]
        config = vllm_config.model_config.hf_config
        n = config.num_hidden_layers
        order = layer_order(getattr(config, LOOP, None), n)
        name = f"{maybe_prefix(prefix, 'model')}.layers"
        inner.layers = LoopedBlocks(inner.layers, order, name, n, vllm_config)
        inner.start_layer, inner.end_layer = 0, len(order)

    def load_weights(self, weights: Weights) -> set[str]:
        """Load the tensors of a checkpoint."""
        return super().load_weights(complete(self, weights))  # type: ignore[misc,no-any-return]


class LoopedLlama(_Looped, LlamaForCausalLM):
    """Llama, SmolLM and similar decoders with a loop."""


class LoopedMistral(_Looped, MistralForCausalLM):
    """Mistral with a loop."""


class LoopedQwen2(_Looped, Qwen2ForCausalLM):
    """Qwen2 with a loop."""


class LoopedQwen3(_Looped, Qwen3ForCausalLM):
    """Qwen3 with a loop."""
