"""Quantizers: a weight and what its layer saw go in, codes, scales and a report come out."""

from __future__ import annotations

from loopq.quantizers.base import Problem, Quantizer
from loopq.registry import Registry

QUANTIZERS: Registry[Quantizer] = Registry("quantizer", "loopq.quantizers")

__all__ = ["QUANTIZERS", "Problem", "Quantizer"]
