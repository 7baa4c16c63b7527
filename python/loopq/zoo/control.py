"""The non-looped control: Huginn's blocks, each run once, with as many bytes as the looped model."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from torch import Tensor, nn

from loopq.errors import ConfigError
from loopq.zoo._layers import RMSNorm, init_linears, rope_tables
from loopq.zoo._model import ZooConfig, ZooModel
from loopq.zoo.huginn import HuginnBlock, HuginnConfig


@dataclasses.dataclass
class ControlConfig(ZooConfig):
    """Settings of `ZooControl`; see `ZooConfig` for the common ones. ``n_steps`` is 1.

    Parameters
    ----------
    n_layers : int
        Blocks, each run once.
    rope_base : float
        Base of the rotary angles.
    """

    model_type: ClassVar[str] = "loopq-zoo-control"
    multiples: ClassVar = (("n_embd", 2, "n_heads"),)
    looped: ClassVar = False

    n_steps: int = 1
    n_layers: int = 2
    rope_base: float = 10_000.0


class ZooControl(ZooModel):
    """Plain decoder: ``lm_head(ln_f(blocks(sqrt(d) wte(ids))))`` with a tied head and depth 1."""

    config_class = ControlConfig
    config: ControlConfig

    def __init__(self, config: ControlConfig) -> None:
        super().__init__()
        self.config = config
        block = HuginnConfig(
            n_embd=config.n_embd,
            n_heads=config.n_heads,
            intermediate_size=config.intermediate_size,
            norm_eps=config.norm_eps,
        )
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "h": nn.ModuleList(HuginnBlock(block) for _ in range(config.n_layers)),
                "ln_f": RMSNorm(config.n_embd, config.norm_eps),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        init_linears(self, config.n_layers)
        self.lm_head.weight = self.transformer["wte"].weight

    def check_inputs(self, input_ids: Tensor, num_steps: int | None) -> int:
        depth = super().check_inputs(input_ids, num_steps)
        if depth != 1:
            raise ConfigError(f"control: this model has no loop, so num_steps must be 1, got {depth}")
        return depth

    def embed_inputs(self, input_ids: Tensor) -> Tensor:
        embeds: Tensor = self.transformer["wte"](input_ids) * math.sqrt(self.config.n_embd)
        return embeds

    def initialize_state(self, input_embeds: Tensor, seed: int | None = None, first_row: int = 0) -> Tensor:
        """Return the embeddings themselves; there is no noise, so ``seed`` changes nothing."""
        return input_embeds

    def iterate_one_step(
        self, input_embeds: Tensor, input_states: Tensor, step: int = 0, num_steps: int | None = None
    ) -> Tensor:
        x = input_states
        rope = rope_tables(x, self.config.n_embd // self.config.n_heads, self.config.rope_base)
        for block in self.transformer["h"]:
            x = block(x, rope)
        return x

    def predict_from_latents(self, latents: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.transformer["ln_f"](latents))
        return logits.float()
