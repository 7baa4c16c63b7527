"""Read weights of a model, and run it with others."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Generic

import numpy as np
from numpy.typing import NDArray

from loopq.errors import CheckpointError
from loopq.layers.shared import SharedParameter
from loopq.models.stream import Stream
from loopq.storage.model_files import is_streamed, source_of, to_torch
from loopq.systems.base import LoopedSystem
from loopq.systems.declare import parameter_of
from loopq.systems.views import System, system_of

if TYPE_CHECKING:
    from torch import Tensor

Weights = Mapping[str, "NDArray[np.float32] | Tensor"]


def stored_weight(system: LoopedSystem, parameter: SharedParameter) -> Tensor:
    """The values of a weight on the model's device, also while its layer is not in memory."""
    stream = source_of(system.model)
    if stream is None:
        return parameter_of(system.model, parameter).detach()
    return system.to_device(to_torch(stream[parameter.name]))


def placed(system: LoopedSystem, weights: Weights) -> Weights:
    """Move weights to the model's device and dtype, for repeated use.

    On the processor they stay in place, since a second copy would cost memory and save little time. Weights of a model
    that is read layer by layer also stay.
    """
    import torch  # lazy: loopq imports without torch

    if system.device.type == "cpu" or is_streamed(system.model):
        return weights
    return {
        name: torch.as_tensor(given).to(
            parameter_of(system.model, name).device, parameter_of(system.model, name).dtype
        )
        for name, given in weights.items()
    }


class Replaced(Generic[System]):
    """A model with other weights in place of some. Use its adapter inside the block of this context manager.

    The model itself does not change, so other threads go on with its own weights. A model that is read layer by layer
    takes its weights from `weights` at each visit, in the thread of the block. They are oriented as in the model, or
    from `placed`.
    """

    def __init__(self, system: System, weights: Weights) -> None:
        from torch import nn  # lazy: loopq imports without torch

        parameters = {name: parameter_of(system.model, name) for name in weights}
        stream = source_of(system.model)
        self._stream = stream if isinstance(stream, Stream) else None
        ids = set() if self._stream is None else self._stream.visited()
        for name, parameter in parameters.items():
            _check_shape(name, parameter, weights[name])
        others = [
            (p, nn.Parameter(_given(name, p, weights), p.requires_grad))
            for name, p in parameters.items()
            if id(p) not in ids
        ]
        #: The adapter of the model with the other weights.
        self.system = system_of(system, *others) if others else system
        self._later = {
            id(p): functools.partial(_given, name, p, weights)
            for name, p in parameters.items()
            if id(p) in ids
        }
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> System:
        if self._stream is not None:
            self._stack.enter_context(self._stream.others(self._later))
        return self.system

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _check_shape(name: str, parameter: Tensor, given: NDArray[np.float32] | Tensor) -> None:
    if tuple(parameter.shape) != tuple(given.shape):
        raise CheckpointError(
            f"layer {name}: weights of shape {list(given.shape)}, the model has {list(parameter.shape)}"
        )


def _given(name: str, parameter: Tensor, weights: Weights) -> Tensor:
    """Return a weight to put in. An array is copied because it belongs to the caller."""
    import torch  # lazy: loopq imports without torch

    given = weights[name]
    _check_shape(name, parameter, given)
    if isinstance(given, np.ndarray):
        return torch.empty_like(parameter.data).copy_(torch.from_numpy(np.ascontiguousarray(given)))
    return given
