"""The recipe of CONTRIBUTING for a system: one file for `loopq/systems`. Nothing here imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopq.layers.shared import SharedParameter
from loopq.systems import SYSTEMS
from loopq.systems.base import Batch, LoopedSystem
from loopq.systems.declare import declare

if TYPE_CHECKING:
    from torch import Tensor, nn


@SYSTEMS.register("madeup")
class MadeUpSystem(LoopedSystem):
    """s' = core(s) from one-hot tokens."""

    summary = "s = core(s) from one-hot tokens"
    n_steps = 3

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Whether the model has such a core."""
        return hasattr(model, "madeup_core")

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """The core, once a step."""
        return declare(self.model, [("madeup_core", {"role": "core"})], n_steps)

    def rollout(self, batch: Batch, n_steps: int) -> Tensor:
        """Run the loop."""
        import torch

        core = self.model.madeup_core
        s = torch.nn.functional.one_hot(batch.input_ids, core.in_features).float()
        with torch.no_grad():
            for _ in range(n_steps):
                s = core(s)
        return s
