"""Checkpoints: quantized layers and the rest of a model, written whole and read back exactly.

`FORMATS` holds what other tools read; the native folder is `loopq.checkpoint.native`.
"""

from loopq.checkpoint.base import Format
from loopq.registry import Registry

FORMATS: Registry[Format] = Registry("checkpoint format", "loopq.checkpoint")
