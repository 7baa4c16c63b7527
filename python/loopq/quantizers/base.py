"""What a quantizer is given and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loopq.checkpoint.layer import QuantizedLayer
from loopq.config import LayerConfig
from loopq.quantizers.metric import LoopMetric


@dataclass(frozen=True)
class Problem:
    """One layer to quantize.

    Parameters
    ----------
    name : str
        Name of the parameter.
    weight : ndarray, float32, shape (out_features, in_features)
        Weight, outputs first whatever the model's storage.
    hessian : ndarray, float64, shape (in_features, in_features), or None
        H = X^T X over the rows of the steps chosen; None where the layer is not observed.
    config : LayerConfig
        Settings.
    orientation : {"out_in", "in_out"}
        How the model stores the weight.
    threads : int
        Threads; 0 takes all cores. It changes no code.
    shared : dict
        Scratch of the input group: what depends on H alone (its factor) is made once and kept here.
    goal : ndarray, float32, shape (out_features, in_features), optional
        What the product with the layer's own input should come near to, where that is not the weight itself: the
        shifted target of asymmetric calibration.
    metric : LoopMetric, optional
        What an error costs at the end of the loop, where the settings ask for it.
    """

    name: str
    weight: NDArray[np.float32]
    hessian: NDArray[np.float64] | None
    config: LayerConfig
    orientation: str
    threads: int
    shared: dict[Any, Any]
    goal: NDArray[np.float32] | None = None
    metric: LoopMetric | None = None

    @property
    def target(self) -> NDArray[np.float32]:
        """`goal`, or the weight."""
        return self.weight if self.goal is None else self.goal


class Quantizer(Protocol):
    """A method that turns a `Problem` into a `QuantizedLayer`.

    Attributes
    ----------
    needs_hessian : bool
        Whether `Problem.hessian` must be there.
    """

    needs_hessian: bool

    def __call__(self, problem: Problem) -> QuantizedLayer:
        """Quantize the layer."""


def layer_from(problem: Problem, result: Mapping[str, Any], method: str) -> QuantizedLayer:
    """Build the layer from what the core gave: codes, scales, zeros; the rest goes to the report."""
    report = {k: v for k, v in result.items() if k not in ("codes", "scales", "zeros")}
    config = problem.config
    return QuantizedLayer(
        name=problem.name,
        bits=config.bits,
        group_size=config.group_size,
        symmetric=config.symmetric,
        codes=result["codes"],
        scales=result["scales"],
        zeros=result["zeros"],
        scale_dtype=config.scale_dtype,
        orientation=problem.orientation,
        report={"method_done": method, **report},
    )


def core_group_size(config: LayerConfig) -> int:
    """Group size as the core takes it: 0 is one scale per output row."""
    return 0 if config.group_size == -1 else config.group_size


def core_scale_dtype(config: LayerConfig) -> str:
    """Scale type as the core takes it: "bfloat16", or "bfloat16:5" where only five significant bits are kept."""
    return config.scale_dtype if config.scale_bits is None else f"{config.scale_dtype}:{config.scale_bits}"
