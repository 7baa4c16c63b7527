"""The parts of vLLM that loopq's classes are made of, in plain PyTorch: one text at once, on one device.

vLLM itself is tested in an environment of its own (`make interop-vllm`). These parts have its signatures and show what
loopq's classes compute, without it.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopq.zoo.layers import RMSNorm

#: Projections of a checkpoint that vLLM keeps in one matrix.
STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")
}  # fmt: skip

#: vLLM's configuration while a model is made.
CURRENT = types.SimpleNamespace(
    device_config=types.SimpleNamespace(device_type="cpu"),
    compilation_config=types.SimpleNamespace(static_forward_context={}),
)


class Product(nn.Linear):
    """A linear layer that gives its output and no bias, as vLLM's do."""

    def __init__(self, n_in: int, n_out: int, bias: bool = True, prefix: str = "", **_: Any) -> None:
        super().__init__(n_in, n_out, bias)
        self.prefix = prefix

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class Merged(Product):
    def __init__(self, n_in: int, parts: list[int], bias: bool = True, **more: Any) -> None:
        super().__init__(n_in, sum(parts), bias, **more)


class QKV(Product):
    def __init__(self, n_in: int, head: int, n: int, n_kv: int, bias: bool = True, **more: Any) -> None:
        super().__init__(n_in, head * (n + 2 * n_kv), bias, **more)
        self.num_heads, self.num_kv_heads = n, n_kv


class Attention(nn.Module):
    """Causal attention of one text; the prefix names its cache."""

    def __init__(
        self, n: int, head: int, scale: float, num_kv_heads: int, prefix: str, attn_type: str = "decoder",
        cache_config: Any = None, quant_config: Any = None, per_layer_sliding_window: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_heads, self.head_size, self.num_kv_heads = n, head, num_kv_heads
        self.impl = types.SimpleNamespace(scale=scale)
        self.quant_config, self.sliding_window = quant_config, per_layer_sliding_window
        self.attn_type, self.prefix, self.calls = attn_type, prefix, 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls += 1
        q, k, v = (x.unflatten(-1, (-1, self.head_size)).transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(self.num_heads // self.num_kv_heads, 0) for x in (k, v))
        age = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        seen = (age >= 0) & (age < (self.sliding_window or len(age)))
        weights = (q @ k.mT * self.impl.scale).masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ v).transpose(0, 1).flatten(1)


def get_rope(head: int, longest: int, is_neox_style: bool, rope_parameters: dict[str, Any]) -> Any:
    """Rotate queries and keys: pairs are halves of a head, or neighbours."""
    rates = rope_parameters["rope_theta"] ** -(torch.arange(0, head, 2).float() / head)

    def turned(x: Tensor, positions: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, head))
        pairs = heads.unflatten(-1, (2, -1)).mT if is_neox_style else heads.unflatten(-1, (-1, 2))
        angle = (positions[:, None] * rates)[:, None]
        a, b = pairs.unbind(-1)
        out = torch.stack((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
        return (out.mT if is_neox_style else out).flatten(-3)

    module = nn.Module()
    module.forward = lambda positions, q, k: (turned(q, positions), turned(k, positions))
    return module


class LlamaAttention(nn.Module):
    def __init__(
        self,
        config: Any,
        width: int,
        n: int,
        n_kv: int,
        longest: int,
        quant_config: Any,
        cache_config: Any,
        prefix: str,
    ) -> None:
        super().__init__()
        head = width // n
        self.widths = [n * head, n_kv * head, n_kv * head]
        self.qkv_proj = QKV(width, head, n, n_kv, bias=False)
        self.o_proj = Product(n * head, width, bias=False)
        self.rotary = get_rope(head, longest, True, {"rope_theta": config.rope_theta})
        self.attn = Attention(n, head, head**-0.5, num_kv_heads=n_kv, prefix=f"{prefix}.attn")

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x)[0].split(self.widths, -1)
        out: Tensor = self.o_proj(self.attn(*self.rotary(positions, q, k), v))[0]
        return out


class LlamaMLP(nn.Module):
    def __init__(self, width: int, wide: int, act: str, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = Merged(width, [wide] * 2, False), Product(wide, width, False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(gated(self.gate_up_proj(x)[0]))[0]
        return out


def gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return nn.functional.silu(gate) * up


class SiluAndMul(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return gated(x)


class LlamaLayer(nn.Module):
    def __init__(self, c: Any, prefix: str) -> None:
        super().__init__()
        sizes = (c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.max_position_embeddings)
        self.self_attn = LlamaAttention(c, *sizes, None, None, f"{prefix}.self_attn")
        self.mlp = LlamaMLP(c.hidden_size, c.intermediate_size, c.hidden_act)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        x = x + self.self_attn(positions, self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class WeightsMapper:
    """Names of a checkpoint that are left out."""

    def __init__(self, orig_to_new_substr: dict[str, None] | None = None) -> None:
        self.left_out = orig_to_new_substr or {}

    def __or__(self, other: WeightsMapper) -> WeightsMapper:
        return WeightsMapper(self.left_out | other.left_out)


class LlamaModel(nn.Module):
    hf_to_vllm_mapper = WeightsMapper()

    def __init__(self, c: Any, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(c, f"{prefix}.layers.{i}") for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.start_layer, self.end_layer = 0, c.num_hidden_layers

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            x = layer(positions, x)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    packed_modules_mapping = STACKED
    hf_to_vllm_mapper = WeightsMapper()
    quant_config: Any = None

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.model = LlamaModel(config, maybe_prefix(prefix, "model"))
        self.lm_head = Head(config.vocab_size, config.hidden_size)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.model(input_ids, positions)
        return out

    def compute_logits(self, states: Tensor) -> Tensor:
        return LogitsProcessor(0)(self.lm_head, states)

    def load_weights(self, weights: Any) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


class Table(nn.Embedding):
    def __init__(self, n: int, width: int, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(n, width)
        self.org_vocab_size = n


class Head(Table):
    def tie_weights(self, table: nn.Embedding) -> nn.Embedding:
        return table


class LogitsProcessor(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()

    def forward(self, head: nn.Embedding, states: Tensor) -> Tensor:
        return states @ head.weight.T


class AutoWeightsLoader:
    """Load a checkpoint's tensors, projections of one matrix together."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def load_weights(self, weights: Any, mapper: WeightsMapper) -> set[str]:
        stored = {n: t for n, t in weights if not any(part in n for part in mapper.left_out)}
        for name, parameter in self.module.named_parameters():
            kind = name.split(".")[-2]
            names = [name.replace(kind, part) for part in STACKED.get(kind, (kind,))]
            stacked = torch.cat([stored.pop(n) for n in names])
            load = getattr(parameter, "weight_loader", lambda p, t: p.data.copy_(t))
            load(parameter, stacked)
        assert not stored, sorted(stored)
        return {name for name, _ in self.module.named_parameters()}


def maybe_prefix(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def modules() -> dict[str, types.ModuleType]:
    """The modules that loopq imports from."""
    layers, models = "vllm.model_executor.layers", "vllm.model_executor.models"
    parts: dict[str, dict[str, Any]] = {
        "vllm.compilation.decorators": {"support_torch_compile": lambda dynamic_arg_dims: lambda cls: cls},
        "vllm.config": {"VllmConfig": object, "get_current_vllm_config": lambda: CURRENT},
        "vllm.distributed": {"get_tensor_model_parallel_rank": lambda: 0},
        "vllm.forward_context": {
            "get_forward_context": lambda: types.SimpleNamespace(
                no_compile_layers=CURRENT.compilation_config.static_forward_context
            )
        },
        f"{layers}.activation": {"SiluAndMul": SiluAndMul},
        f"{layers}.attention": {"Attention": Attention},
        f"{layers}.layernorm": {"RMSNorm": RMSNorm},
        f"{layers}.linear": {
            "ColumnParallelLinear": lambda *args, gather_output=False, **more: Product(*args, **more),
            "MergedColumnParallelLinear": Merged, "QKVParallelLinear": QKV, "RowParallelLinear": Product,
            "LinearBase": Product, "UnquantizedLinearMethod": type("UnquantizedLinearMethod", (), {}),
        },
        f"{layers}.quantization": {"register_quantization_config": lambda name: lambda cls: cls},
        f"{layers}.quantization.base_config": {
            "QuantizationConfig": type("QuantizationConfig", (), {}),
            "QuantizeMethodBase": type("QuantizeMethodBase", (), {}),
        },
        f"{layers}.logits_processor": {"LogitsProcessor": LogitsProcessor},
        f"{layers}.rotary_embedding": {"get_rope": get_rope},
        f"{layers}.vocab_parallel_embedding": {"ParallelLMHead": Head, "VocabParallelEmbedding": Table},
        f"{models}.interfaces": {"SupportsQuant": type("SupportsQuant", (), {"quant_config": None})},
        f"{models}.llama": {
            "LlamaAttention": LlamaAttention, "LlamaForCausalLM": LlamaForCausalLM, "LlamaMLP": LlamaMLP,
            "LlamaModel": LlamaModel,
        },
        f"{models}.utils": {
            "WeightsMapper": WeightsMapper, "maybe_prefix": maybe_prefix, "AutoWeightsLoader": AutoWeightsLoader
        },
    }  # fmt: skip
    for kind in ("mistral", "qwen2", "qwen3"):
        name = f"{kind.capitalize()}ForCausalLM"
        parts[f"{models}.{kind}"] = {name: type(name, (LlamaForCausalLM,), {})}
    by_name = {}
    for name, contents in parts.items():
        by_name[name] = types.ModuleType(name)
        vars(by_name[name]).update(contents)
        for parent in (name[:i] for i, c in enumerate(name) if c == "."):
            by_name.setdefault(parent, types.ModuleType(parent)).__path__ = []  # type: ignore[attr-defined]
    return by_name


def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Put the parts in vLLM's place, and give a function that imports a module of `loopq.runtime.vllm`."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    package = importlib.import_module("loopq.runtime.vllm")
    imported = ("models", "dory", "loops", "packed", "codes")
    try:
        yield lambda name: importlib.import_module(f"loopq.runtime.vllm.{name}")
    finally:
        for name in imported:
            sys.modules.pop(f"loopq.runtime.vllm.{name}", None)
            vars(package).pop(name, None)
