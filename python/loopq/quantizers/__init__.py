"""Quantizers: a weight and the Hessian of its inputs go in, codes, scales and a report come out.

Each file holds one method and its settings; a new file that registers itself adds a method.
"""

from __future__ import annotations

from loopq.quantizers.base import Method, Problem
from loopq.settings.registry import Registry

QUANTIZERS: Registry[type[Method]] = Registry("method", "loopq.quantizers")

__all__ = ["QUANTIZERS", "Method", "Problem"]
