"""Weights of a diagnosis: shared weights, rounded or otherwise changed, outputs first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loopq.errors import ConfigError, NonFiniteError
from loopq.quantizers.base import Problem
from loopq.quantizers.config import LayerConfig
from loopq.storage.weights import as_stored as stored
from loopq.storage.weights import outputs_first
from loopq.systems.declare import parameter_of

if TYPE_CHECKING:
    from loopq.layers.shared import SharedParameter
    from loopq.systems.base import LoopedSystem

Matrix = NDArray[np.float32]
Weights = Mapping[str, Matrix]
Rounder = Callable[[Matrix, LayerConfig], Matrix]


def weight_of(system: LoopedSystem, shared: SharedParameter) -> Matrix:
    """Return a float32 copy of a shared weight as (out_features, in_features)."""
    value: Matrix = parameter_of(system.model, shared).detach().float().cpu().numpy().copy()
    return outputs_first(value, shared.orientation)


def as_stored(system: LoopedSystem, weights: Weights, n_steps: int) -> dict[str, Matrix]:
    """Return float32 weights (out_features, in_features) in the orientation of the model, for `Replaced`.

    Raises
    ------
    ConfigError
        If a name is not shared, or a shape does not fit.
    NonFiniteError
        If a new weight contains NaN or infinity.
    """
    shared = {p.name: p for p in system.shared_parameters(n_steps)}
    _check(weights, shared)
    return {n: stored(v, shared[n].orientation) for n, v in weights.items()}


def _check(weights: Weights, shared: Mapping[str, SharedParameter]) -> None:
    for name, value in weights.items():
        if name not in shared:
            raise ConfigError(f"{name} is not a shared parameter; those are: {', '.join(shared)}")
        expected = (shared[name].out_features, shared[name].in_features)
        if value.shape != expected:
            raise ConfigError(f"layer {name}: a weight of shape {expected} is needed; got {value.shape}")
        if not np.isfinite(value).all():
            row, column = (int(i) for i in np.argwhere(~np.isfinite(value))[0])
            raise NonFiniteError(f"layer {name}: the new weight[{row}, {column}] is {value[row, column]}")


def core_rounder(weight: Matrix, config: LayerConfig) -> Matrix:
    """Round to nearest with the native core and dequantize to float32."""
    return config.quantize(Problem("", weight, None, config.grid)).dequantize()


def rounded(
    system: LoopedSystem,
    parameters: Sequence[SharedParameter],
    config: LayerConfig,
    rounder: Rounder = core_rounder,
) -> dict[str, Matrix]:
    """Round every parameter to nearest and return it by name, outputs first."""
    return {p.name: rounder(weight_of(system, p), config) for p in parameters}


def input_blocks(shared: SharedParameter) -> dict[str, slice]:
    """Column ranges of a concatenated input. An adapter twice as wide as its output takes state, then embedding.

    Returns
    -------
    dict of str to slice
        Empty where the input is not concatenated.
    """
    width = shared.out_features
    if shared.role == "adapter" and shared.in_features == 2 * width:
        return {"state": slice(0, width), "embedding": slice(width, 2 * width)}
    return {}


def keep_columns(weight: Matrix, changed: Matrix, columns: slice) -> Matrix:
    """Take `changed` in some columns and `weight` in the others (Li, App. E)."""
    out = weight.copy()
    out[:, columns] = changed[:, columns]
    return out


def gaussian_like(weight: Matrix, norm: float, seed: int) -> Matrix:
    """Add one Gaussian draw of a given Frobenius norm (Li, Table 3)."""
    noise = np.random.default_rng(seed).normal(size=weight.shape)
    out: Matrix = (weight + noise * (norm / np.linalg.norm(noise))).astype(np.float32)
    return out


def quantizable(parameters: Sequence[SharedParameter]) -> list[SharedParameter]:
    """Parameters that a run quantizes by default: all except those kept dense."""
    return [p for p in parameters if p.treatment != "dense"]
