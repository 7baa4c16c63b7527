"""The stored weights of a model: each tensor once, tied names, and the single access to a layer's matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loopq.errors import NonFiniteError
from loopq.storage.files import RawTensor
from loopq.storage.model_files import model_tensors

if TYPE_CHECKING:
    from torch import nn


class Stored(Protocol):
    """Description of a weight's storage; `loopq.layers.shared.SharedParameter` is one."""

    @property
    def name(self) -> str:
        """Name of the parameter."""

    @property
    def orientation(self) -> str:
        """ "out_in", "in_out", "table" or "conv"."""


def stored_shape(shape: tuple[int, int], orientation: str) -> tuple[int, ...]:
    """Return the model's storage shape of a weight with shape (out_features, in_features)."""
    return shape[::-1] if orientation == "in_out" else (*shape, 1) if orientation == "conv" else shape


def as_stored(values: NDArray[np.float32], orientation: str) -> NDArray[np.float32]:
    """Return a weight of shape (out_features, in_features) in the model's storage order, C-contiguous."""
    turned = values.T if orientation == "in_out" else values
    return np.ascontiguousarray(turned).reshape(stored_shape(values.shape, orientation))


def outputs_first(values: NDArray[Any], orientation: str) -> NDArray[Any]:
    """Return a stored weight in shape (out_features, in_features), C-contiguous."""
    plain = values[..., 0] if orientation == "conv" else values
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

    def oriented(self, parameter: Stored) -> NDArray[np.float32]:
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
