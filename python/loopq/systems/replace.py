"""Other weights in a model for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from loopq.errors import CheckpointError
from loopq.systems.base import LoopedSystem

Weights = Mapping[str, NDArray[np.float32]]


@contextlib.contextmanager
def replaced(system: LoopedSystem, weights: Weights) -> Iterator[None]:
    """Put other weights into the model, in place, and the old ones back afterwards, also after an error.

    Parameters
    ----------
    system : LoopedSystem
        The model's adapter.
    weights : mapping of str to ndarray, float32
        Parameter name to new values in the model's own orientation.
    """
    import torch

    parameters = {name: system.model.get_parameter(name) for name in weights}
    for name, parameter in parameters.items():
        if tuple(parameter.shape) != weights[name].shape:
            raise CheckpointError(
                f"layer {name}: weights of shape {list(weights[name].shape)}, the model has {list(parameter.shape)}"
            )
    saved = {name: p.detach().clone() for name, p in parameters.items()}
    try:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(weights[name])))
        yield
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(saved[name])
