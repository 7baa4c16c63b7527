"""Tiny untrained members of the zoo, and what each must show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from loopq import zoo
from loopq.zoo._model import ZooModel

Calls = dict[str, int]


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A tiny config, the calls of each linear in a rollout, and the parameters that no gradient reaches."""

    config: dict[str, Any]
    calls: Callable[[ZooModel, int], Calls]
    unused: set[str] = dataclasses.field(default_factory=set)

    @property
    def depths(self) -> tuple[int, ...]:
        """Depths to try; only 1 where the model has no loop."""
        return (1,) if self.config["n_steps"] == 1 else (1, 3)


def tiny(name: str) -> ZooModel:
    """Return the tiny model of a kind, drawn from seed 0, with norms and vectors moved off their defaults."""
    torch.manual_seed(0)
    model = zoo.model_class(f"loopq-zoo-{name}").from_config(TINY[name].config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim < 2:
                p.add_(0.1 * torch.randn_like(p))
    return model


def _blocks(prefix: str, count: int, linears: tuple[str, ...], n: int) -> Calls:
    return {f"{prefix}.{i}.{linear}": n for i in range(count) for linear in linears}


_HUGINN_BLOCK = ("attn.Wqkv", "attn.proj", "mlp.fc", "mlp.proj")


def _huginn_calls(_: ZooModel, n: int) -> Calls:
    return {
        "transformer.wte": 1,
        "transformer.adapter": n,
        "lm_head": 1,
        **_blocks("transformer.prelude", 1, _HUGINN_BLOCK, 1),
        **_blocks("transformer.core_block", 2, _HUGINN_BLOCK, n),
        **_blocks("transformer.coda", 1, _HUGINN_BLOCK, 1),
    }


def _rllama_calls(_: ZooModel, n: int) -> Calls:
    return {
        "transformer.wte": 1,
        "transformer.adapter": n,
        "lm_head": 1,
        **_blocks("transformer.core_block", 2, _HUGINN_BLOCK, n),
        **_blocks("transformer.coda", 1, _HUGINN_BLOCK, 1),
    }


def _llama_calls(n: int, **extra: int) -> Calls:
    linears = tuple(f"self_attn.{x}_proj" for x in "qkvo") + tuple(
        f"mlp.{x}_proj" for x in ("gate", "up", "down")
    )
    extra = {f"model.{k}": v for k, v in extra.items()}
    return {"model.embed_tokens": 1, "lm_head": 1, **_blocks("model.layers", 2, linears, n), **extra}


def _loopformer_calls(_: ZooModel, n: int) -> Calls:
    linears = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "adaLN_modulation.1")
    embedders = {f"{e}.mlp.{i}": n for e in ("time_embedder", "dt_embedder") for i in (0, 2)}
    return {
        "transformer.wte": 1,
        "transformer.wpe": 0,  # read as a table
        "lm_head": 1,
        **_blocks("transformer.h.blocks", 2, linears, n),
        **embedders,
    }


def _parcae_calls(_: ZooModel, n: int) -> Calls:
    linears = ("attn.c_q", "attn.c_k", "attn.c_v", "attn.c_proj", "mlp.fc", "mlp.proj")
    return {
        "transformer.wte": 1,
        "transformer.C": 1,
        "lm_head": 1,
        "transformer.value_embeds.1": n,
        "transformer.value_embeds.3": 1,
        "transformer.core_block.0.attn.ve_gate": n,
        "transformer.coda.0.attn.ve_gate": 1,
        **_blocks("transformer.prelude", 1, linears, 1),
        **_blocks("transformer.core_block", 2, linears, n),
        **_blocks("transformer.coda", 1, linears, 1),
    }


def _ponder_calls(_: ZooModel, n: int) -> Calls:
    linears = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    return {"gpt_neox.embed_in": 1, "embed_out": n, **_blocks("gpt_neox.layers", 2, linears, n)}


def _mamba_calls(_: ZooModel, n: int) -> Calls:
    calls = {"backbone.embeddings": 1, "lm_head": 1}
    called = _blocks("backbone.layers", 3, ("mixer.in_proj", "mixer.x_proj", "mixer.out_proj"), n)
    return {**calls, **called, **_blocks("backbone.layers", 3, ("mixer.dt_proj",), 0)}


_BASE = {"n_embd": 32, "n_heads": 2, "intermediate_size": 48, "n_steps": 3, "block_size": 16}

TINY: dict[str, Tiny] = {
    "huginn": Tiny({**_BASE, "n_prelude": 1, "n_coda": 1}, _huginn_calls),
    "rllama": Tiny({**_BASE, "n_heads": 4, "n_coda": 1}, _rllama_calls),
    "ouro": Tiny(
        {**_BASE, "n_layers": 2},
        lambda _, n: _llama_calls(n, early_exit_gate=n),
        unused={"model.early_exit_gate.weight", "model.early_exit_gate.bias"},
    ),
    "nanbeige": Tiny({**_BASE, "n_layers": 2, "n_kv_heads": 1, "head_dim": 12}, lambda _, n: _llama_calls(n)),
    "loopformer": Tiny(_BASE, _loopformer_calls),
    "parcae": Tiny({**_BASE, "n_prelude": 1, "n_coda": 1}, _parcae_calls),
    "control": Tiny(
        {**_BASE, "n_steps": 1},
        lambda _, n: {
            "transformer.wte": 1,
            "lm_head": 1,
            **_blocks("transformer.h", 2, _HUGINN_BLOCK, n),
        },
    ),
    "mamba": Tiny({**_BASE, "n_steps": 1}, _mamba_calls),
    "ponder": Tiny({**_BASE, "n_layers": 2}, _ponder_calls),
}
