"""Mamba has no shared block. The recurrence runs over tokens inside a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from loopq.errors import ConfigError
from loopq.layers.shared import SharedParameter
from loopq.systems import SYSTEMS
from loopq.systems.base import Batch, LoopedSystem, Published
from loopq.systems.declare import declare
from loopq.systems.outputs import cached, logits_of, past


@SYSTEMS.register("mamba")
class Mamba(LoopedSystem):
    """transformers' Mamba, for experiments on feedback. It is not a looped transformer.

    Each weight is called once in a rollout, so the depth is 1. The feedback goes through `A_log`, a parameter without
    a module. It gives the decay of the state at every token. `dt_proj` is used through its weight and never called.
    """

    name = "mamba"
    summary = "h = exp(dt A) h + dt B x over tokens; each weight once"
    published = Published({"Mamba-130M": 72, "Mamba-2.8B": 192}, exposed=("A_log, kept as it is",))

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Recognised by `backbone.layers` with `mixer.x_proj`."""
        return "backbone.layers.0.mixer.x_proj" in dict(model.named_modules())

    @property
    def n_steps(self) -> int:
        """Always 1."""
        return 1

    def check_depth(self, n_steps: int) -> int:
        """Reject every depth but 1."""
        if n_steps != 1:
            raise ConfigError(f"mamba: the recurrence is over tokens, so n_steps must be 1; got {n_steps}")
        return n_steps

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """`in_proj`, `x_proj` and `out_proj` of every layer."""
        inputs: dict[str, Any] = {"role": "mixer", "fused": "x+z"}
        parameters: dict[str, Any] = {"role": "mixer", "fused": "dt+B+C"}
        kinds = (("in_proj", inputs), ("x_proj", parameters), ("out_proj", {"role": "mixer"}))
        modules = [
            (f"backbone.layers.{i}.mixer.{name}", fields)
            for i in range(len(self.model.backbone.layers))
            for name, fields in kinds
        ]
        return declare(self.model, modules, n_steps)

    def left_out(self) -> dict[str, str]:
        """Parameters that the scan uses without a call."""
        reasons = {
            "A_log": "decay of the state: the feedback itself, a bare parameter",
            "D": "skip of the scan, a vector",
            "dt_proj.weight": "used through its weight, the module is never called",
            "conv1d.weight": "depthwise convolution, used through its weight",
        }
        return {
            f"backbone.layers.{i}.mixer.{name}": reason
            for i in range(len(self.model.backbone.layers))
            for name, reason in reasons.items()
        }

    def rollout(self, batch: Batch, n_steps: int) -> Tensor:
        """Run the model's own forward without a cache."""
        self.check_depth(n_steps)
        ids = self.to_device(batch.input_ids)
        with torch.set_grad_enabled(self.keeps_graph):
            return logits_of(self.model(input_ids=ids, use_cache=False))

    def extend(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any]:
        """Continue from the states of the recurrence."""
        ids = self.to_device(batch.input_ids[:, n_seen:])
        return cached(self.model(input_ids=ids, **past(self.model, cache)))
