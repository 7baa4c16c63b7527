"""The stored weights of a model: each tensor once, tied names, and the single access to a layer's matrix."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loopq.errors import CheckpointError, NonFiniteError
from loopq.storage.files import RawTensor
from loopq.storage.model_files import model_tensors
from loopq.storage.schema import Allowed

if TYPE_CHECKING:
    from torch import nn


_SIZE = "[1-9][0-9]{0,4}"
#: Storage of a weight: like `nn.Linear`, transposed like GPT-2's `Conv1D`, as a lookup table, or as the kernel of a
#: convolution. "conv" is `nn.Conv1d` with kernel 1, "conv3" with kernel 3, "conv3x5" `nn.Conv2d` with kernel (3, 5).
Orientation = Annotated[
    str,
    Allowed(
        "'out_in', 'in_out', 'table', 'conv', or 'conv' and the size of a kernel, as 'conv3x3'",
        re.compile(rf"out_in|in_out|table|conv({_SIZE}(x{_SIZE}){{0,2}})?").fullmatch,
    ),
]


class OrientedWeight(Protocol):
    """Description of a weight's storage; `loopq.layers.shared.SharedParameter` is one."""

    @property
    def name(self) -> str:
        """Name of the parameter."""

    @property
    def orientation(self) -> str:
        """See `Orientation`."""


def kernel_of(orientation: str) -> tuple[int, ...]:
    """Size of a convolution's kernel along each axis. Empty for other weights."""
    if not orientation.startswith("conv"):
        return ()
    return tuple(int(n) for n in (orientation.removeprefix("conv") or "1").split("x"))


def conv_orientation(kernel: Sequence[int]) -> str:
    """Return the orientation of a convolution's weight. A column of its matrix is an input channel and a place."""
    return "conv" if tuple(kernel) == (1,) else "conv" + "x".join(map(str, kernel))


def stored_shape(shape: tuple[int, int], orientation: str) -> tuple[int, ...]:
    """Return the model's storage shape of a weight with shape (out_features, in_features).

    Raises
    ------
    CheckpointError
        The columns of a convolution are no whole number of kernels.
    """
    kernel = kernel_of(orientation)
    if not kernel:
        return shape[::-1] if orientation == "in_out" else shape
    channels, rest = divmod(shape[1], math.prod(kernel))
    if rest:
        raise CheckpointError(
            f"orientation {orientation}: a kernel has {math.prod(kernel)} numbers for each input channel, so the "
            f"columns must be a multiple of that; got {shape[1]}"
        )
    return (shape[0], channels, *kernel)


def as_stored(values: NDArray[np.float32], orientation: str) -> NDArray[np.float32]:
    """Return a weight of shape (out_features, in_features) in the model's storage order, C-contiguous."""
    turned = values.T if orientation == "in_out" else values
    return np.ascontiguousarray(turned).reshape(stored_shape(values.shape, orientation))


def outputs_first(values: NDArray[Any], orientation: str) -> NDArray[Any]:
    """Return a stored weight in shape (out_features, in_features), C-contiguous."""
    plain = values.reshape(len(values), -1) if kernel_of(orientation) else values
    return np.ascontiguousarray(plain.T if orientation == "in_out" else plain)


@dataclass(frozen=True)
class ModelWeights:
    """The stored weights of a model.

    Parameters
    ----------
    tensors : mapping of str to RawTensor
        Every tensor under its first name.
    ties : mapping of str to str
        Maps every further name to the first one.
    """

    tensors: Mapping[str, RawTensor]
    ties: Mapping[str, str]

    @classmethod
    def of_model(cls, model: nn.Module) -> ModelWeights:
        """Return the state of a torch model, in its own memory."""
        return cls(*model_tensors(model))

    def raw(self, name: str) -> RawTensor:
        """Return a stored tensor by any of its names."""
        return self.tensors[self.ties.get(name, name)]

    def oriented(self, parameter: OrientedWeight) -> NDArray[np.float32]:
        """Return a weight in float32, outputs first, C-contiguous, shape (out_features, in_features).

        Raises
        ------
        NonFiniteError
            The weight holds NaN or infinity. The message gives the place.
        """
        weight = outputs_first(self.raw(parameter.name).float32(), parameter.orientation)
        if not np.isfinite(weight).all():
            row, column = (int(i) for i in np.argwhere(~np.isfinite(weight))[0])
            raise NonFiniteError(
                f"layer {parameter.name}: weight[{row}, {column}] is {weight[row, column]}; the stored model is "
                "damaged or overflowed: convert it again from its source"
            )
        return weight
