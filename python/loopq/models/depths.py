"""A model at several depths: one rollout covers each depth, on the same prompts and initial states."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loopq.errors import ConfigError
from loopq.layers.shared import SharedParameter
from loopq.systems.base import Batch, LoopedSystem
from loopq.systems.capabilities import Describes, Discovers, FixedLength, TakesCalls

if TYPE_CHECKING:
    from torch import Tensor, nn

    from loopq.models.load import LoadedModel


class Depths(LoopedSystem):
    """Adapter that wraps another one and runs several depths in one rollout.

    The steps of a weight are its calls at the first depth, then those at the second, and so on. Sums over all steps
    are therefore sums over all depths. Gradients come from the outputs of all depths.
    """

    def __init__(self, system: LoopedSystem, depths: Sequence[int]) -> None:
        super().__init__(system.model)
        if len(set(depths)) != len(depths) or len(depths) < 2:
            raise ConfigError(f"n_steps: several depths must be different ones; got {list(depths)}")
        self.system, self.depths = system, tuple(system.check_depth(n) for n in depths)
        self.name, self.output, self.published = system.name, system.output, system.published  # type: ignore[misc]
        # Of the other's capabilities, those that do not run it at one depth.
        if isinstance(system, Discovers):
            self.look, self.missed = system.look, system.missed
        if isinstance(system, TakesCalls):
            self.answer, self.n_rows = system.answer, system.n_rows
        if isinstance(system, Describes):
            self.describe_loop = system.describe_loop
        if isinstance(system, FixedLength):
            self.prompt_length = system.prompt_length

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Never by itself."""
        return False

    @property
    def n_steps(self) -> int:
        """The largest of the depths."""
        return max(self.depths)

    def check_depth(self, n_steps: int) -> int:
        """Reject every depth but the largest, which represents all."""
        if n_steps != self.n_steps:
            raise ConfigError(
                f"several depths run at once: {', '.join(map(str, self.depths))}; got {n_steps}"
            )
        return n_steps

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """The weights of all depths, with their calls at all of them."""
        self.check_depth(n_steps)
        shared: dict[str, SharedParameter] = {}
        for depth in self.depths:
            for p in self.system.shared_parameters(depth):
                before = shared[p.name].invocations if p.name in shared else 0
                shared[p.name] = dataclasses.replace(p, invocations=before + p.invocations)
        return tuple(shared.values())

    def rollout(self, batch: Batch, n_steps: int) -> Tensor:
        """Run all depths and concatenate their outputs along the tokens."""
        import torch  # lazy: loopq imports without torch

        self.check_depth(n_steps)
        return torch.cat([self.system.rollout(batch, depth) for depth in self.depths], dim=1)

    def left_out(self) -> dict[str, str]:
        """As in the other adapter."""
        return self.system.left_out()


def at_depths(loaded: LoadedModel, n_steps: int | Sequence[int] | None) -> tuple[LoadedModel, int | None]:
    """Return the model with rollouts at one or several depths, and the depth to use."""
    if n_steps is None or isinstance(n_steps, int):
        return loaded, n_steps
    if len(n_steps) == 1:
        return loaded, n_steps[0]
    return dataclasses.replace(loaded, system=Depths(loaded.system, n_steps)), None
