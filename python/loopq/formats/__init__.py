"""Checkpoints: quantized layers and the rest of a model, written whole and read back exactly.

`FORMATS` holds what other tools read; the native folder is `loopq.formats.native`.
"""

from loopq.formats.base import Format
from loopq.settings.registry import Registry

FORMATS: Registry[Format] = Registry("checkpoint format", "loopq.formats")
