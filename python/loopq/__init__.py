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

import importlib
from pathlib import Path
from typing import Any

from loopq._native import __version__
from loopq.api import evaluate, load, quantize, solve
from loopq.errors import LoopqError
from loopq.quantizers.config import LayerConfig, Override
from loopq.run.config import QuantConfig
from loopq.run.destination import export
from loopq.settings.execution import Execution

__all__ = [
    "Execution",
    "LayerConfig",
    "LoopqError",
    "Override",
    "QuantConfig",
    "__version__",
    "evaluate",
    "export",
    "load",
    "quantize",
    "solve",
]

#: Public functions of the guests, which are imported when they are first used, and the folder of each.
_OF_GUESTS = {"diagnose": "analysis", "generate": "runtime"}
__all__ += [n for n, room in _OF_GUESTS.items() if (Path(__path__[0]) / room / "api.py").is_file()]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'loopq' has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(f"loopq.{_OF_GUESTS[name]}.api"), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
