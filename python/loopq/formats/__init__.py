"""Formats for writing a quantized model and reading it back exactly. `FORMATS` lists all names."""

from loopq.formats.base import Format
from loopq.settings.registry import Registry

FORMATS: Registry[Format] = Registry(
    "format",
    "loopq.formats",
    removed={
        "marlin": "write gptq (4 bits, symmetric); engines reorder its codes for the Marlin kernel themselves"
    },
)
