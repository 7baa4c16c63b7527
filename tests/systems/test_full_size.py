"""The layer counts of Li, App. Q, on full-size models without memory, built from the published configurations."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from loopq.systems import find_system
from loopq.systems.base import LoopedSystem
from loopq.systems.loopus import build_loopus

Shapes = dict[str, tuple[int, ...]]


def skeleton(shapes: Shapes, **config: Any) -> nn.Module:
    """Modules with these names and weight shapes, without memory; a name that ends in "!" is a bare parameter."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, last = name.rstrip("!").split(".")
        parent = root
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent._modules[part]
        weight = nn.Parameter(torch.empty(shape, device="meta"))
        if name.endswith("!"):
            parent.register_parameter(last, weight)
        else:
            leaf = nn.Module()
            leaf.register_parameter("weight", weight)
            parent.add_module(last, leaf)
    _listed(root)
    root.config = SimpleNamespace(**config)
    return root


def _listed(module: nn.Module) -> None:
    """Turn children that are numbered from 0 into module lists, as they are in the published classes."""
    for name, child in list(module._modules.items()):
        _listed(child)
        if list(child._modules) == [str(i) for i in range(len(child._modules))] and child._modules:
            module._modules[name] = nn.ModuleList(child._modules.values())


def _raven(d: int, qkv: int, wide: int, core: int, norms: int, **config: Any) -> nn.Module:
    shapes: Shapes = {"transformer.wte": (65536, d), "transformer.adapter": (d, 2 * d), "lm_head": (65536, d)}
    for i in range(core):
        block = f"transformer.core_block.{i}"
        shapes |= {
            f"{block}.attn.Wqkv": (qkv, d),
            f"{block}.attn.proj": (d, d),
            f"{block}.mlp.fc": (2 * wide, d),
            f"{block}.mlp.proj": (d, wide),
        }
        shapes |= {f"{block}.norm_{n + 1}": (d,) for n in range(norms)}
    return skeleton(shapes, mean_recurrence=32, **config)


def _llama(
    d: int, heads: int, kv: int, wide: int, layers: int, vocab: int, gate: bool, **config: Any
) -> nn.Module:
    shapes: Shapes = {"model.embed_tokens": (vocab, d), "lm_head": (vocab, d)}
    if gate:
        shapes["model.early_exit_gate"] = (1, d)
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj": (heads, d),
            f"{layer}.self_attn.k_proj": (kv, d),
            f"{layer}.self_attn.v_proj": (kv, d),
            f"{layer}.self_attn.o_proj": (d, heads),
            f"{layer}.mlp.gate_proj": (wide, d),
            f"{layer}.mlp.up_proj": (wide, d),
            f"{layer}.mlp.down_proj": (d, wide),
        }
    return skeleton(shapes, **config)


def _ouro(layers: int) -> nn.Module:
    model = _llama(2048, 2048, 2048, 5632, layers, 49152, True, model_type="ouro", total_ut_steps=4)
    model.model.total_ut_steps = 4
    return model


def _nanbeige() -> nn.Module:
    config = {"model_type": "nanbeige", "num_loops": 2, "loop_loss_weights": []}
    return _llama(3072, 6144, 1024, 10752, 22, 166144, False, **config)


def _iquest() -> nn.Module:
    model = _llama(5120, 5120, 1024, 27648, 80, 76800, False, loop_num=2)
    model.model.gate_projections = nn.ModuleList(
        skeleton({"weight!": (40, 128), "bias!": (40,)}) for _ in range(80)
    )
    return model


def _loopus() -> nn.Module:
    base = {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": False,
    }  # fmt: skip
    parts = {"encoder": [0, 1], "reasoning": list(range(2, 27)), "decoder": [27]}
    layers = {f"{part}_layer_indices": numbers for part, numbers in parts.items()}
    with torch.device("meta"):
        return build_loopus({"base_config_dict": base, "N": 6, **layers})


def _loopformer() -> nn.Module:
    shapes: Shapes = {"gpt.transformer.wte": (50304, 2048), "gpt.lm_head": (50304, 2048)}
    for name in ("time_embedder", "dt_embedder"):
        shapes |= {f"gpt.{name}.mlp.0": (2048, 256), f"gpt.{name}.mlp.2": (2048, 2048)}
    for i in range(3):
        block = f"gpt.transformer.h.blocks.{i}"
        shapes |= {
            f"{block}.attn.c_attn": (6144, 2048),
            f"{block}.attn.c_proj": (2048, 2048),
            f"{block}.mlp.c_fc": (5120, 2048),
            f"{block}.mlp.c_proj": (2048, 5120),
            f"{block}.adaLN_modulation.1": (8192, 2048),
        }
    return skeleton(shapes)


def _parcae(d: int, heads: int, blocks: int) -> nn.Module:
    adapter = "transformer.adapter"
    shapes: Shapes = {f"{adapter}.A_log!": (d,), f"{adapter}.dt_bias!": (d,), f"{adapter}.B!": (d, d)}
    for i in range(blocks):
        block = f"transformer.core_block.{i}"
        shapes |= {f"{block}.attn.{name}": (d, d) for name in ("c_q", "c_k", "c_v", "c_proj")}
        shapes |= {f"{block}.mlp.fc": (4 * d, d), f"{block}.mlp.proj": (d, 4 * d)}
        if i % 2:
            shapes[f"{block}.attn.ve_gate"] = (heads, 32)
    return skeleton(shapes, mean_recurrence=8)


def _on_meta(kind: str, config: Any) -> nn.Module:
    import transformers

    with torch.device("meta"):
        return getattr(transformers, kind)(config)


def _ponder() -> nn.Module:
    from transformers import GPTNeoXConfig

    config = GPTNeoXConfig(
        vocab_size=50304,
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=32,
        num_attention_heads=32,
    )
    config.pondering_steps = 3
    return _on_meta("GPTNeoXForCausalLM", config)


def _coconut() -> nn.Module:
    from transformers import GPT2Config

    from loopq.systems.coconut import wrap_gpt2

    base = _on_meta("GPT2LMHeadModel", GPT2Config(vocab_size=50260))
    return wrap_gpt2(base, start_id=50257, end_id=50258, latent_id=50259)


def _mamba(d: int, layers: int) -> nn.Module:
    from transformers import MambaConfig

    config = MambaConfig(
        vocab_size=50280, hidden_size=d, num_hidden_layers=layers, time_step_rank=math.ceil(d / 16)
    )
    return _on_meta("MambaForCausalLM", config)


def _native(kind: str, config: str, **settings: Any) -> nn.Module:
    import transformers

    return _on_meta(kind, getattr(transformers, config)(**settings))


# Model, system, depth, counts by default treatment, weights in all of them, input widths.
FULL_SIZE: dict[str, tuple[Any, str, int, dict[str, int], int, set[int]]] = {
    "Huginn-3.5B": (
        lambda: _raven(5280, 15840, 17920, 4, 4),
        "huginn", 32, {"gptq": 17}, 1_637_222_400, {10560, 5280, 17920},
    ),
    "R-Llama-1.4B": (
        lambda: _raven(2048, 3072, 8192, 6, 2),
        "rllama", 32, {"gptq": 25},
        2048 * 4096 + 6 * (3072 * 2048 + 2048 * 2048 + 16384 * 2048 + 2048 * 8192),
        {4096, 2048, 8192},
    ),
    "Recurrent-TinyLlama": (
        lambda: _raven(2048, 2560, 5632, 8, 2),
        "rllama", 32, {"gptq": 33},
        2048 * 4096 + 8 * (2560 * 2048 + 2048 * 2048 + 11264 * 2048 + 2048 * 5632),
        {4096, 2048, 5632},
    ),
    "Recurrent-OLMo-2": (
        lambda: _raven(2048, 6144, 8192, 6, 2),
        "rllama", 32, {"gptq": 25},
        2048 * 4096 + 6 * (6144 * 2048 + 2048 * 2048 + 16384 * 2048 + 2048 * 8192),
        {4096, 2048, 8192},
    ),
    "IQuest-Coder-V1-40B-Loop": (
        _iquest, "iquest", 2, {"gptq": 560}, 80 * (2 * 5120 * 5120 + 2 * 1024 * 5120 + 3 * 27648 * 5120),
        {5120, 27648},
    ),
    "LoopUS-Qwen3-1.7B": (
        _loopus, "loopus", 6, {"gptq": 196}, 28 * (2 * 2048 * 2048 + 2 * 1024 * 2048 + 3 * 6144 * 2048), {2048, 6144},
    ),
    "Ouro-1.4B": (lambda: _ouro(24), "ouro", 4, {"gptq": 168}, 1_233_125_376, {2048, 5632}),
    "Ouro-2.6B": (lambda: _ouro(48), "ouro", 4, {"gptq": 336}, 2_466_250_752, {2048, 5632}),
    "LoopFormer-278M": (
        _loopformer, "loopformer", 8, {"gptq": 12, "rtn": 3}, 3 * (6144 + 2048 + 5120 + 5120 + 8192) * 2048,
        {2048, 5120},
    ),
    "Parcae-140M": (
        lambda: _parcae(768, 6, 2), "parcae", 8, {"gptq": 12, "dense": 1}, 2 * 12 * 768**2 + 6 * 32, {768, 3072, 32},
    ),
    "Parcae-1.3B": (
        lambda: _parcae(1536, 12, 8), "parcae", 8, {"gptq": 48, "dense": 4}, 8 * 12 * 1536**2 + 4 * 12 * 32,
        {1536, 6144, 32},
    ),
    "PonderPythia-2.8B": (_ponder, "ponder", 4, {"gptq": 129}, 32 * 12 * 2560**2 + 50304 * 2560, {2560, 10240}),
    "Nanbeige4.2-3B": (_nanbeige, "nanbeige", 2, {"gptq": 154, "rtn": 1}, 3_659_268_096, {3072, 6144, 10752}),
    "COCONUT GPT-2": (_coconut, "coconut", 5, {"gptq": 48}, 12 * 12 * 768**2, {768, 3072}),
    "Mamba-130M": (
        lambda: _mamba(768, 24), "mamba", 1, {"gptq": 72}, 24 * (3072 * 768 + 80 * 1536 + 768 * 1536), {768, 1536},
    ),
    "Mamba-2.8B": (
        lambda: _mamba(2560, 64), "mamba", 1, {"gptq": 192}, 64 * (10240 * 2560 + 192 * 5120 + 2560 * 5120),
        {2560, 5120},
    ),
    "HRM-Text-1B": (
        lambda: _native("HrmTextForCausalLM", "HrmTextConfig"),
        "hrm_text", 2, {"gptq": 256}, 32 * (5 * 1536**2 + 3 * 1536 * 4096), {1536, 4096},
    ),
    "ALBERT-base": (
        lambda: _native(
            "AlbertModel", "AlbertConfig", hidden_size=768, num_attention_heads=12, intermediate_size=3072,
        ),
        "albert", 12, {"gptq": 6}, 12 * 768**2, {768, 3072},
    ),
}  # fmt: skip


def _open(name: str) -> LoopedSystem:
    return find_system(FULL_SIZE[name][0]())


@pytest.mark.parametrize("name", FULL_SIZE)
def test_counts_of_the_paper(name: str) -> None:
    _, kind, n_steps, counts, weights, widths = FULL_SIZE[name]
    system = _open(name)
    assert (system.name, system.n_steps) == (kind, n_steps)
    shared = system.shared_parameters(n_steps)
    got: dict[str, int] = {}
    for parameter in shared:
        got[parameter.treatment] = got.get(parameter.treatment, 0) + 1
    assert got == counts
    assert sum(p.in_features * p.out_features for p in shared) == weights
    assert {p.in_features for p in shared} == widths
    quantized = sum(n for treatment, n in counts.items() if treatment != "dense")
    assert system.published.checkpoints[name] == quantized


def test_every_published_count_is_checked() -> None:
    from loopq.systems import SYSTEMS

    named = {name for _, cls in SYSTEMS for name in cls.published.checkpoints}
    # Dory and Inkling are counted by `check --plan` (tests/run/test_estimate.py).
    vendors = {"Inkling-2-Mini", "NVIDIA-Nemotron-Labs-Dory1.0-4B"}
    assert named - set(FULL_SIZE) - vendors == {"PL-BERT (Kokoro)", "Zamba-7B", "Zamba2-1.2B"}


def test_invocations_at_the_deployed_depth() -> None:
    assert {p.invocations for p in _open("Huginn-3.5B").shared_parameters(32)} == {32}
    nanbeige = _open("Nanbeige4.2-3B").shared_parameters(2)
    assert [p.invocations for p in nanbeige] == [2] * 154 + [1]
    hrm = _open("HRM-Text-1B").shared_parameters(2)
    assert [p.invocations for p in hrm] == [6] * 128 + [2] * 128


def test_feedback_exposed_layers() -> None:
    def exposed(name: str) -> list[str]:
        system = _open(name)
        return [p.name for p in system.shared_parameters(system.n_steps) if p.exposed]

    assert exposed("Huginn-3.5B") == exposed("R-Llama-1.4B") == ["transformer.adapter.weight"]
    assert len(exposed("PonderPythia-2.8B")) == 1
    assert exposed("PonderPythia-2.8B")[0] in ("embed_out.weight", "lm_head.weight")
    assert exposed("Ouro-1.4B") == exposed("COCONUT GPT-2") == exposed("Nanbeige4.2-3B") == []


def test_orientation_of_coconut_is_transposed() -> None:
    shared = _open("COCONUT GPT-2").shared_parameters(5)
    assert {p.orientation for p in shared} == {"in_out"}
    assert (shared[0].in_features, shared[0].out_features) == (768, 2304)
