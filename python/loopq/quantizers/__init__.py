"""Quantizers: they take a weight and the Hessian of its inputs and return codes, scales and a report.

Each file holds one method and its settings. To add a method, add a file that registers it. Methods that only the
paper's tables need are in `loopq.paper.quantizers`.
"""

from __future__ import annotations

from loopq.quantizers.base import Method, Problem
from loopq.settings.registry import Registry

QUANTIZERS: Registry[type[Method]] = Registry(
    "method", "loopq.quantizers", rooms={"awq": "paper", "awq-fold": "paper"}
)

__all__ = ["QUANTIZERS", "Method", "Problem"]
