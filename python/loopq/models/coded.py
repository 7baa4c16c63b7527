"""Layers that keep their codes in a model. A guest of the quantizer brings the modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from loopq.errors import ConfigError
from loopq.formats.checkpoint import Checkpoint
from loopq.settings.registry import Registry

#: How activations enter a product: "float" in 24-bit fixed point (16-bit where they are bfloat16), or "int8".
Activations = Literal["float", "int8"]


@dataclass(frozen=True)
class CodedLayers:
    """Puts modules with codes into a torch model.

    Parameters
    ----------
    coded : callable
        Names of the checkpoint's layers that get such a module, of (model, checkpoint).
    install : callable
        Replaces their modules, of (model, checkpoint, activations). Returns the layers that keep a dequantized
        weight, with the reason.
    """

    coded: Callable[[Any, Checkpoint], set[str]]
    install: Callable[[Any, Checkpoint, Activations], dict[str, str]]


CODED: Registry[CodedLayers] = Registry("kind of coded layers", "loopq.models")


def coded_layers() -> CodedLayers:
    """Return the factory of modules with codes.

    Raises
    ------
    ConfigError
        No guest brings one.
    """
    for _, layers in CODED:
        return layers
    raise ConfigError("quantized=True needs the folder loopq/runtime, which this installation lacks")
