"""Zamba and Zamba2: one attention block tied into several places of a Mamba stack."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from loopq.errors import ConfigError
from loopq.layers.shared import SharedParameter
from loopq.systems import SYSTEMS
from loopq.systems.base import Batch, LoopedSystem, Published
from loopq.systems.declare import declare, owners_of_parameters
from loopq.systems.outputs import cached, logits_of, past

_BLOCKS = ("shared_transf", "shared_transformer")
_LOW_RANK = "_adapter_list."


@SYSTEMS.register("zamba")
class Zamba(LoopedSystem):
    """transformers' Zamba and Zamba2.

    The shared block's weights belong to several distinct modules, each called once. The next step of a weight is the
    next of its modules. Zamba2 alternates between several blocks. It also gives every place separate low-rank
    adapters, which are not shared. The places are built in, so there is one depth.
    """

    summary = "one attention block tied into several layers of a Mamba stack"
    published = Published({"Zamba-7B": 7, "Zamba2-1.2B": 6})

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Recognised by layers with a shared transformer block beside a Mamba decoder."""
        return any(name.endswith(".mamba_decoder") for name, _ in model.named_modules()) and any(
            name.rsplit(".", 1)[-1] in _BLOCKS for name, _ in model.named_modules()
        )

    @property
    def _tied(self) -> dict[str, int]:
        """First owner of each matrix tied in several places, and their number."""
        owners = owners_of_parameters(self.model)
        tied = {}
        for name, module in self.model.named_modules():
            weight = module._parameters.get("weight")
            inside = any(f".{block}." in f".{name}." for block in _BLOCKS)
            if inside and weight is not None and weight.ndim == 2 and len(owners[id(weight)]) > 1:
                tied[owners[id(weight)][0]] = len(owners[id(weight)])
        return tied

    @property
    def _shared(self) -> dict[str, int]:
        return {name: places for name, places in self._tied.items() if _LOW_RANK not in name}

    @property
    def n_steps(self) -> int:
        """Number of places of the most used block."""
        return max(self._shared.values(), default=1)

    def check_depth(self, n_steps: int) -> int:
        """Reject every depth but the one built in."""
        if n_steps != self.n_steps:
            raise ConfigError(
                f"zamba: the shared block has {self.n_steps} places, so n_steps must be that; got {n_steps}"
            )
        return n_steps

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Every matrix of the shared blocks, called once per place."""
        modules: list[tuple[str, dict[str, Any]]] = []
        for name, places in self._shared.items():
            role = "attention" if ".self_attn." in name else "mlp"
            fused = "gate+up" if name.endswith("gate_up_proj") else ""
            modules.append((name, {"role": role, "invocations": places, "fused": fused}))
        return declare(self.model, modules, n_steps)

    def left_out(self) -> dict[str, str]:
        """Zamba2's low-rank adapters. They are tied like the block, but each is used in one place only."""
        reason = "low-rank adapter of one place, called once"
        return {f"{name}.weight": reason for name in self._tied if _LOW_RANK in name}

    def rollout(self, batch: Batch, n_steps: int) -> Tensor:
        """Run the model's own forward without a cache."""
        self.check_depth(n_steps)
        with torch.set_grad_enabled(self.keeps_graph):
            return logits_of(self.model(input_ids=self.to_device(batch.input_ids), use_cache=False))

    def extend(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any]:
        """Continue with the model's cache."""
        return cached(
            self.model(input_ids=self.to_device(batch.input_ids[:, n_seen:]), **past(self.model, cache))
        )
