"""Other weights in a model for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loopq.errors import CheckpointError
from loopq.systems.base import LoopedSystem

if TYPE_CHECKING:
    from torch import Tensor

Weights = Mapping[str, "NDArray[np.float32] | Tensor"]


def placed(system: LoopedSystem, weights: Weights) -> Weights:
    """Weights on the model's device in the model's own type, to be put in more than once.

    On the processor they stay as they are: a second copy of each would be memory for little time.
    """
    import torch  # lazy: loopq imports without torch

    if system.device.type == "cpu":
        return weights
    return {
        name: torch.as_tensor(given).to(system.weight(name).device, system.weight(name).dtype)
        for name, given in weights.items()
    }


@contextlib.contextmanager
def replaced(system: LoopedSystem, weights: Weights) -> Iterator[None]:
    """Put other weights into the model, and the old ones back afterwards, also after an error.

    The memory of the old ones is not written to: whoever reads it meanwhile finds what was there.

    Parameters
    ----------
    system : LoopedSystem
        The model's adapter.
    weights : mapping of str to ndarray, float32, or of what `placed` gives
        Parameter name to new values in the model's own orientation.
    """
    import torch  # lazy: loopq imports without torch

    parameters = {name: system.weight(name) for name in weights}
    for name, parameter in parameters.items():
        if tuple(parameter.shape) != tuple(weights[name].shape):
            raise CheckpointError(
                f"layer {name}: weights of shape {list(weights[name].shape)}, the model has {list(parameter.shape)}"
            )
    saved = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            given = weights[name]
            if isinstance(given, np.ndarray):
                # Never the array itself: the caller's.
                given = torch.empty_like(parameter.data).copy_(torch.from_numpy(np.ascontiguousarray(given)))
            parameter.data = given
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = saved[name]
