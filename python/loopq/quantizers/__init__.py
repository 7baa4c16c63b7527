"""Quantizers: a weight and what its layer saw go in, codes, scales and a report come out."""

from __future__ import annotations

from loopq.config import QuantConfig
from loopq.quantizers.base import Problem, Quantizer
from loopq.registry import Registry

QUANTIZERS: Registry[Quantizer] = Registry("quantizer", "loopq.quantizers")

__all__ = ["QUANTIZERS", "Problem", "Quantizer", "check_methods"]


def check_methods(config: QuantConfig) -> None:
    """Refuse settings that name a quantizer which does not exist.

    Raises
    ------
    ConfigError
        The message names the quantizers there are.
    """
    for method in (config.layer.method, *(o.changes.get("method", "dense") for o in config.overrides)):
        if method != "dense":
            QUANTIZERS.get(method)
