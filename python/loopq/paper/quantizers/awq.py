"""AWQ: channels are scaled by a power of their activation magnitude, then rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.layers.grid import ScaleSearch
from loopq.layers.layer import QuantizedLayer
from loopq.layers.transforms import ChannelScale
from loopq.quantizers import QUANTIZERS, Method, Problem
from loopq.quantizers.rtn import round_to_grid
from loopq.settings.declare import setting

POWERS = tuple(k / 20 for k in range(20))


@QUANTIZERS.register("awq")
@dataclass(frozen=True)
class AWQ(Method):
    """Channels scaled by a power of their magnitude, then rounded to nearest.

    Parameters
    ----------
    scale_search : {"max", "half-range", "mse"}
        Scale of a group. `max` gives the largest magnitude the highest code. `half-range` places it half the code range
        from zero. `mse` takes the scale of least squared error on a shrink grid.

    Notes
    -----
    The method rounds W diag(s) with s_j = a_j^p, where a_j is the root mean square of channel j over the chosen steps.
    It takes the power p in 0, 0.05, ..., 0.95 with the least tr(D H D^T). s is normalised so that the geometric mean of
    its extremes is 1, and stored in float16. Inputs are divided by s at run time, or s is folded into the preceding
    layer. Power 0 is plain rounding. Clipping is not searched.
    """

    transforms: ClassVar[bool] = True
    in_other_formats: ClassVar[str] = "awq-fold"
    scale_search: ScaleSearch = setting("mse")

    def scale(self, magnitude: NDArray[np.float64], power: float) -> ChannelScale:
        """Return the scale of a power."""
        return ChannelScale(channel_scale(magnitude, power))

    def search(self, problems: Sequence[Problem]) -> tuple[float, ChannelScale]:
        """Return the power with the least loss, summed over layers of one input, and its scale."""
        hessian = problems[0].require_observed()
        magnitude = np.sqrt(np.diag(hessian))
        best: tuple[float, float, ChannelScale] | None = None
        for power in POWERS:
            scale = self.scale(magnitude, power)
            loss = 0.0
            for p in problems:
                result = round_to_grid(p, scale.fold(p.target), self.scale_search)
                rounded = p.grid.dequantize(result["codes"], result["scales"], result["zeros"])
                loss += native.proxy(p.target, scale.unfold(rounded), hessian, threads=p.threads)
            if best is None or loss < best[0]:
                best = (loss, power, scale)
        assert best is not None
        return best[1:]

    def quantize(self, problem: Problem) -> QuantizedLayer:
        """Quantize a layer."""
        power, scale = self.search([problem])
        return self.scaled(problem, power, scale)

    def scaled(self, problem: Problem, power: float, scale: ChannelScale) -> QuantizedLayer:
        """Round a layer in the basis of a scale."""
        result = round_to_grid(problem, scale.fold(problem.target), self.scale_search)
        layer = problem.layer(result, self.name).with_report(awq_power=power)
        return layer.with_transform(scale) if power > 0 else layer


def channel_scale(magnitude: NDArray[np.float64], power: float) -> NDArray[np.float32]:
    """s = a^p over the geometric mean of its extremes, with float16 values. Channels without activation get 1."""
    live = magnitude > 0
    scale = np.where(live, np.where(live, magnitude, 1.0) ** power, np.nan)
    if not live.any():
        return np.ones(len(magnitude), dtype=np.float32)
    scale = scale / np.sqrt(np.nanmax(scale) * np.nanmin(scale))
    stored: NDArray[np.float32] = np.where(live, scale, 1.0).astype(np.float16).astype(np.float32)
    return np.maximum(stored, np.float32(2.0**-14))
