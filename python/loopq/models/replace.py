"""Read weights of a model, and temporarily replace them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.errors import CheckpointError
from loopq.layers.shared import SharedParameter
from loopq.storage.model_files import is_streamed, source_of, to_torch
from loopq.systems.base import LoopedSystem
from loopq.systems.declare import parameter_of

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


@contextlib.contextmanager
def replaced(system: LoopedSystem, weights: Weights) -> Iterator[None]:
    """Put other weights into the model and restore the old ones afterwards, also after an error.

    The old weights' memory is not overwritten, so concurrent readers still find the old values. A model that is read
    layer by layer takes its weights from `weights` at each visit.

    Parameters
    ----------
    system : LoopedSystem
        The model's adapter.
    weights : mapping of str to float32 ndarray or output of `placed`
        Parameter name to new values, oriented as in the model.
    """
    from loopq.models.stream import Stream  # lazy: loopq imports without torch

    parameters, stream = {name: parameter_of(system.model, name) for name in weights}, source_of(system.model)
    visited: dict[str, Any] = {}
    if isinstance(stream, Stream):
        ids = stream.visited()
        visited = {name: p for name, p in parameters.items() if id(p) in ids}
        parameters = {name: p for name, p in parameters.items() if name not in visited}
    for name, parameter in parameters.items():
        _check_shape(name, parameter, weights[name])
    saved = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = _given(name, parameter, weights)
        later = {id(p): functools.partial(_given, name, p, weights) for name, p in visited.items()}
        with stream.others(later) if isinstance(stream, Stream) else contextlib.nullcontext():
            yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = saved[name]


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
