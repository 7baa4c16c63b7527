"""Quantizer for looped (recurrent-depth) transformers.

It needs numpy and safetensors. Functions that run a model need the extra "torch".
"""

import signal
import sys

# While the program `loopq` imports, Ctrl-C ends it at once. Otherwise some modules would report a failed import, others
# a traceback. As a library loopq changes nothing. Only necessary modules are imported before.
if sys.argv and sys.argv[0].replace("\\", "/").rpartition("/")[2] in ("-m", "loopq", "loopq.exe"):
    # Until a handler with a message exists.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from loopq.terminal.interrupts import end_at_once

    signal.signal(signal.SIGINT, end_at_once)

from loopq._native import __version__
from loopq.api import diagnose, evaluate, generate, load, quantize, solve
from loopq.errors import LoopqError
from loopq.quantizers.config import LayerConfig, Override
from loopq.run.config import QuantConfig
from loopq.run.export import export
from loopq.settings.execution import Execution

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
    "generate",
    "load",
    "quantize",
    "solve",
]
