"""Put quantized modules in the place of a model's linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import loopq._native as native
from loopq.checkpoint.layer import QuantizedLayer
from loopq.checkpoint.native import Checkpoint
from loopq.errors import CheckpointError
from loopq.lazy import require

if TYPE_CHECKING:
    from torch import nn


def install(model: nn.Module, checkpoint: Checkpoint) -> dict[str, str]:
    """Replace every linear layer that a checkpoint quantizes by a module that holds codes and scales.

    Parameters
    ----------
    model : nn.Module
        Model that the checkpoint's weights were put into (`loopq.checkpoint.native.load_into`).
    checkpoint : Checkpoint
        Its layers.

    Returns
    -------
    dict of str to str
        Layers that keep a dequantized weight, with the reason.

    Raises
    ------
    CheckpointError
        A layer of the checkpoint is no module of the model.
    """
    torch = require("torch")
    modules = dict(model.named_modules(remove_duplicate=False))
    made: dict[int, Any] = {}
    kept: dict[str, str] = {}
    for layer in checkpoint.layers.values():
        owners = [layer.name, *(tied for tied, source in checkpoint.ties.items() if source == layer.name)]
        found = [modules.get(name.removesuffix(".weight")) for name in owners]
        if any(module is None for module in found):
            raise CheckpointError(f"layer {layer.name}: the model has no module of this name")
        strange = {type(module).__name__ for module in found if type(module) is not torch.nn.Linear}
        if strange:
            kept[layer.name] = f"held by {', '.join(sorted(strange))}, which is not nn.Linear"
            continue
        for module in found:
            # One quantized module stands for one linear module, however many names that has.
            if id(module) not in made:
                made[id(module)] = _module(layer, module)
    for name, module in modules.items():
        if id(module) in made:
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, made[id(module)])
    return kept


def _module(layer: QuantizedLayer, linear: Any) -> Any:
    """`QuantLinear` for what it holds: symmetric codes of the plain input; else the reference over packed codes."""
    from loopq.kernels.modules import QuantLinear
    from loopq.kernels.reference import PackedLinear

    device = linear.weight.device
    scales = np.ascontiguousarray(layer.scales)
    if layer.symmetric and layer.transform is None:
        return QuantLinear.from_codes(layer.codes, scales, layer.group_size, layer.bits, linear.bias).to(
            device
        )
    middle = 1 << (layer.bits - 1)
    zeros = np.full(scales.shape, middle, np.uint8) if layer.zeros is None else layer.zeros
    packed = native.pack_dense(layer.codes, layer.bits, middle if layer.symmetric else 0)
    module = PackedLinear(
        packed, scales, zeros, in_features=layer.shape[1], group_size=layer.group_size, bits=layer.bits,
        bias=linear.bias, transform=layer.transform,
    )  # fmt: skip
    return module.to(device)
