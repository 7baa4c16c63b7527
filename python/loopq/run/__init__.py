"""The engine of a run: plans of layers, inputs, solvers and estimates of cost."""

from __future__ import annotations

from loopq.run.inputs import Inputs
from loopq.settings.registry import Registry

INPUTS: Registry[type[Inputs]] = Registry(
    "inputs", "loopq.run", rooms={"closed-loop": "paper", "equal-rows": "paper"}
)

__all__ = ["INPUTS", "Inputs"]
