"""Adapters of looped systems: what is shared, how a rollout runs, what a step is."""

from __future__ import annotations

from loopq.settings.registry import Registry
from loopq.systems.base import Batch, LoopedSystem, SharedParameter

SYSTEMS: Registry[type[LoopedSystem]] = Registry("system", "loopq.systems")

__all__ = ["SYSTEMS", "Batch", "LoopedSystem", "SharedParameter"]
