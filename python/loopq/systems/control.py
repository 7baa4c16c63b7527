"""The zoo's control: a plain decoder of the same blocks that has no loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopq.errors import ConfigError
from loopq.systems import SYSTEMS
from loopq.systems.base import SharedParameter, declare
from loopq.systems.raven import BLOCK_LINEARS
from loopq.systems.stepwise import StepwiseSystem

if TYPE_CHECKING:
    from torch import nn


@SYSTEMS.register("control")
class Control(StepwiseSystem):
    """The zoo's non-looped control: every weight is called once, so one-step and N-step are the same."""

    name = "control"
    summary = "no loop: every block once, to compare with"

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Told by the zoo's model type."""
        return getattr(getattr(model, "config", None), "model_type", "") == "loopq-zoo-control"

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
        modules = [
            (f"transformer.h.{i}.{suffix}", fields)
            for i in range(len(self.model.transformer.h))
            for suffix, fields in BLOCK_LINEARS
        ]
        return declare(self.model, modules, n_steps)
