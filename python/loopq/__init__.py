"""Quantizer for looped (recurrent-depth) transformers.

Needs numpy and safetensors; everything that runs a model needs the extra "torch".
"""

import signal
import sys

# While the program `loopq` imports, Ctrl-C ends it on the spot: some modules take it for a failed import, and the rest
# is a traceback. Where loopq is a library nothing is changed. Nothing is imported before that which can be spared.
if sys.argv and sys.argv[0].replace("\\", "/").rpartition("/")[2] in ("-m", "loopq", "loopq.exe"):
    # Until there is a handler that says so.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from loopq.terminal.interrupts import end_at_once

    signal.signal(signal.SIGINT, end_at_once)

from loopq._native import __version__
from loopq.api import diagnose, evaluate, load, quantize, solve
from loopq.errors import LoopqError
from loopq.quantizers.config import LayerConfig, Override
from loopq.run.config import QuantConfig
from loopq.run.export import export
from loopq.settings.execution import Execution

# These functions hide the packages of the same name. `import loopq.diagnose.rank as rank` finds what they hide by the
# function's name.
for _hides in (diagnose, evaluate):
    _hides.__name__ = f"loopq.{_hides.__qualname__}"

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
