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


_BASE = {"n_embd": 32, "n_heads": 2, "intermediate_size": 48, "n_steps": 3, "block_size": 16}

TINY: dict[str, Tiny] = {
    "huginn": Tiny({**_BASE, "n_prelude": 1, "n_coda": 1}, _huginn_calls),
}
