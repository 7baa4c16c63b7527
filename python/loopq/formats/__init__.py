"""Formats: how a quantized model is written, whole, and read back exactly. `FORMATS` is the one list of names."""

from loopq.formats.base import Format
from loopq.settings.registry import Registry

FORMATS: Registry[Format] = Registry("format", "loopq.formats")
