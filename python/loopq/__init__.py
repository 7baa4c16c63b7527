"""Quantizer for looped (recurrent-depth) transformers.

Needs numpy and safetensors; everything that runs a model needs the extra "torch".
"""

from loopq._native import __version__
from loopq.api import load, quantize, solve
from loopq.config import LayerConfig, Override, QuantConfig
from loopq.errors import LoopqError

__all__ = [
    "LayerConfig",
    "LoopqError",
    "Override",
    "QuantConfig",
    "__version__",
    "load",
    "quantize",
    "solve",
]
