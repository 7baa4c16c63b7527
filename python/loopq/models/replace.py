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
    """Put other weights into the model, and the old ones back afterwards, also after an error.

    The memory of the old ones is not written to: whoever reads it meanwhile finds what was there.

    Parameters
    ----------
    system : LoopedSystem
        The model's adapter.
    weights : mapping of str to ndarray, float32
        Parameter name to new values in the model's own orientation.
    """
    import torch  # lazy: loopq imports without torch

    parameters = {name: system.weight(name) for name in weights}
    for name, parameter in parameters.items():
        if tuple(parameter.shape) != weights[name].shape:
            raise CheckpointError(
                f"layer {name}: weights of shape {list(weights[name].shape)}, the model has {list(parameter.shape)}"
            )
    saved = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            given = torch.from_numpy(np.ascontiguousarray(weights[name]))
            # Never the array itself: the caller's.
            parameter.data = torch.empty_like(parameter.data).copy_(given)
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = saved[name]
