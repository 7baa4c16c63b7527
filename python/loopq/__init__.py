"""Quantizer for looped (recurrent-depth) transformers.

Needs numpy and safetensors; everything that runs a model needs the extra "torch".
"""

from loopq._native import __version__
from loopq.api import diagnose, evaluate, load, quantize, solve
from loopq.errors import LoopqError
from loopq.execution import Execution
from loopq.quantizers.config import LayerConfig, Override
from loopq.run.config import QuantConfig
from loopq.run.export import export

__all__ = [
    "Execution",
    "LayerConfig",
    "LoopqError",
    "Override",
    "QuantConfig",
    "__version__",
    "diagnose",
    "evaluate",
    "export",
    "load",
    "quantize",
    "solve",
]
