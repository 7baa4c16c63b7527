"""Adapters of looped systems: their shared weights, rollouts and steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopq.errors import SystemContractError
from loopq.settings.registry import Registry
from loopq.systems.base import Batch, LoopedSystem

if TYPE_CHECKING:
    from torch import nn

SYSTEMS: Registry[type[LoopedSystem]] = Registry("system", "loopq.systems")

__all__ = ["SYSTEMS", "Batch", "LoopedSystem", "find_system", "fitting_systems"]


def fitting_systems(model: nn.Module) -> list[type[LoopedSystem]]:
    """Return the adapters that fit a model by its structure."""
    return [cls for _, cls in SYSTEMS if cls.matches(model)]


def find_system(model: nn.Module) -> LoopedSystem:
    """Return the adapter that fits the model.

    Raises
    ------
    SystemContractError
        If none fits, or more than one does.
    """
    fitting = fitting_systems(model)
    if len(fitting) == 1:
        return fitting[0](model)
    kind = type(model).__name__
    if not fitting:
        plain = hasattr(getattr(model, "model", None), "layers")
        loop = "; to run some of its layers several times, name it looped:MODEL[FIRST:LAST]xTIMES" * plain
        raise SystemContractError(
            f"no looped system fits {kind}; `loopq check` lists those there are, and --system names one "
            f"(--system generic takes whatever one run calls more than once){loop}"
        )
    raise SystemContractError(
        f"several systems fit {kind}: {', '.join(c.name for c in fitting)}; choose one with --system"
    )
