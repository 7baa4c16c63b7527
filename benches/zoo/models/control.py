"""The control without a loop: Huginn's blocks, each run once, with as many bytes as the looped model.

It is a class that loopq knows nothing of; the adapter for it below is what a user writes for a model of their own.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor, nn

from loopq.errors import ConfigError
from loopq.layers.shared import SharedParameter
from loopq.systems import SYSTEMS, Batch, LoopedSystem
from loopq.systems.declare import declare
from loopq.zoo.config import SmallConfig
from loopq.zoo.huginn import HuginnBlock
from loopq.zoo.layers import RMSNorm, init_linears, rotary_angles


@dataclasses.dataclass
class ControlConfig(SmallConfig):
    """Settings of `SmallControl`; see `SmallConfig` for the common ones.

    Parameters
    ----------
    n_layers : int
        Blocks, each run once.
    rope_base : float
        Base of the rotary angles.
    """

    model_type: ClassVar[str] = "loopq-zoo-control"
    multiples: ClassVar = (("n_embd", 2, "n_heads"),)

    n_layers: int = 2
    rope_base: float = 10_000.0


class SmallControl(nn.Module):
    """Plain decoder: ``lm_head(ln_f(blocks(sqrt(d) wte(ids))))`` with a tied head."""

    def __init__(self, config: ControlConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "h": nn.ModuleList(HuginnBlock(config) for _ in range(config.n_layers)),
                "ln_f": RMSNorm(config.n_embd, config.norm_eps),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        init_linears(self, config.n_layers)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        """Return float32 `logits` (batch, seq, vocab) of int64 ids (batch, seq)."""
        x = self.transformer["wte"](input_ids) * math.sqrt(self.config.n_embd)
        positions = torch.arange(x.shape[1], device=x.device)
        angles = rotary_angles(positions, self.config.n_embd // self.config.n_heads, self.config.rope_base)
        rope = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        for block in self.transformer["h"]:
            x = block(x, rope)
        return SimpleNamespace(logits=self.lm_head(self.transformer["ln_f"](x)).float())


@SYSTEMS.register("control")
class Control(LoopedSystem):
    """Adapter of the control: every weight is called once, so one-step and N-step calibration are the same."""

    name = "control"
    summary = "no loop: every block once, to compare with"

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Told by the class."""
        return isinstance(model, SmallControl)

    @property
    def n_steps(self) -> int:
        """Always 1."""
        return 1

    def check_depth(self, n_steps: int) -> int:
        """Refuse every depth but 1."""
        if n_steps != 1:
            raise ConfigError(f"control: the model has no loop, so n_steps must be 1; got {n_steps}")
        return n_steps

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Four linears of every block."""
        linears = (
            ("attn.Wqkv", "attention"),
            ("attn.proj", "attention"),
            ("mlp.fc", "mlp"),
            ("mlp.proj", "mlp"),
        )
        fused = {"attn.Wqkv": "q+k+v", "mlp.fc": "gate+up"}
        modules = [
            (f"transformer.h.{i}.{name}", {"role": role, "fused": fused.get(name, "")})
            for i in range(len(self.model.transformer.h))
            for name, role in linears
        ]
        return declare(self.model, modules, n_steps)

    def rollout(self, batch: Batch, n_steps: int) -> Tensor:
        """Run the model once."""
        self.check_depth(n_steps)
        with torch.set_grad_enabled(self.keeps_graph):
            logits: Tensor = self.model(self.to_device(batch.input_ids)).logits
        return logits
