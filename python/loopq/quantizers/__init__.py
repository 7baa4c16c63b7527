"""Quantizers: they take a weight and the Hessian of its inputs and return codes, scales and a report.

Each file holds one method and its settings. To add a method, add a file that registers it.
"""

from __future__ import annotations

from loopq.quantizers.base import Method, Problem
from loopq.settings.registry import Registry

QUANTIZERS: Registry[type[Method]] = Registry("method", "loopq.quantizers")

__all__ = ["QUANTIZERS", "Method", "Problem"]
