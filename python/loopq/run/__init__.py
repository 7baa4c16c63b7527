"""The engine: what is quantized, from which inputs, solved how, and what it will take."""

from __future__ import annotations

from loopq.run.inputs import Inputs
from loopq.settings.registry import Registry

INPUTS: Registry[type[Inputs]] = Registry("inputs", "loopq.run")

__all__ = ["INPUTS", "Inputs"]
