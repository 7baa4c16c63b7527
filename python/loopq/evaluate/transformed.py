"""Layers that transform their input at run time, in the place of the model's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopq.checkpoint.layer import QuantizedLayer
from loopq.errors import CheckpointError
from loopq.rotation import ChannelScale, Rotation
from loopq.systems.base import LoopedSystem


class TransformedLinear(nn.Module):  # type: ignore[misc]  # torch is not followed
    """y = W' (T x) + b with the dequantized W' of a quantized layer.

    Parameters
    ----------
    layer : QuantizedLayer
        A layer with or without an input transform.
    bias : Tensor or None
        The bias of the module that is replaced.
    like : Tensor
        Gives type and device.
    """

    def __init__(self, layer: QuantizedLayer, bias: Tensor | None, like: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(layer.stored_values()).to(like), requires_grad=False)
        self.out_features, self.in_features = self.weight.shape
        self.bias = bias
        self._blocks: list[Tensor] = []
        self._sizes: list[int] = []
        self._scale: Tensor | None = None
        if isinstance(layer.transform, Rotation):
            self._sizes = layer.transform.sizes()
            unique = {
                n: torch.from_numpy(layer.transform.matrix(n).T.copy()).to(like) for n in set(self._sizes)
            }
            self._blocks = [unique[n] for n in self._sizes]
        elif isinstance(layer.transform, ChannelScale):
            self._scale = torch.from_numpy(layer.transform.scale).to(like)

    def transform(self, x: Tensor) -> Tensor:
        """T x for every row of the last axis."""
        if self._scale is not None:
            return x / self._scale
        if not self._blocks:
            return x
        parts = x.split(self._sizes, dim=-1)
        return torch.cat([part @ block for part, block in zip(parts, self._blocks, strict=True)], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.linear(self.transform(x), self.weight, self.bias)
        return out


@contextlib.contextmanager
def installed(system: LoopedSystem, layers: Mapping[str, QuantizedLayer]) -> Iterator[None]:
    """Let a model run with quantized layers that transform their input; its own modules come back afterwards.

    Parameters
    ----------
    system : LoopedSystem
        The model's adapter.
    layers : mapping of str to QuantizedLayer
        By parameter name. Every module that holds the parameter is replaced.

    Raises
    ------
    CheckpointError
        A parameter that the model does not have, or of another shape.
    """
    model = system.model
    before: list[tuple[nn.Module, str, nn.Module]] = []
    modules = dict(model.named_modules(remove_duplicate=False))
    try:
        for name, layer in layers.items():
            parameter = model.get_parameter(name)
            shape = layer.shape if layer.orientation == "out_in" else layer.shape[::-1]
            if tuple(parameter.shape) != tuple(shape):
                raise CheckpointError(
                    f"layer {name}: of shape {list(shape)}, the model has {list(parameter.shape)}"
                )
            for path, module in modules.items():
                if module._parameters.get("weight") is not parameter:
                    continue
                parent, _, leaf = path.rpartition(".")
                new = TransformedLinear(layer, getattr(module, "bias", None), parameter.detach())
                before.append((modules[parent], leaf, module))
                modules[parent]._modules[leaf] = new
        yield
    finally:
        for owner, leaf, module in reversed(before):
            owner._modules[leaf] = module


def folded(layers: Mapping[str, QuantizedLayer]) -> dict[str, np.ndarray]:
    """The same layers as plain weights in the model's orientation, float32."""
    return {name: layer.in_model_orientation() for name, layer in layers.items()}
