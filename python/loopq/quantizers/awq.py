"""AWQ (paper, A4): channels scaled up by a power of their activation magnitude before rounding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.checkpoint.layer import QuantizedLayer
from loopq.errors import SolveError
from loopq.quantizers import QUANTIZERS
from loopq.quantizers.base import Problem, core_group_size, core_scale_dtype, layer_from
from loopq.rotation import ChannelScale

POWERS = tuple(k / 20 for k in range(20))


class AWQ:
    """Round W diag(s) to nearest, s_j = a_j^p, with the power p of least tr(D H D^T) out of 0, 0.05, ..., 0.95.

    Notes
    -----
    a_j is the root mean square of channel j over the rows of the steps chosen (steps "first", "31", "all" give
    the paper's three variants), s is scaled so that the geometric mean of its extremes is 1 and stored in float16;
    inputs are divided by s at run time, or s is folded into what comes before. Power 0 is plain rounding. Clipping is
    not searched.
    """

    needs_hessian = True

    def __call__(self, problem: Problem) -> QuantizedLayer:
        """Quantize the layer."""
        if problem.hessian is None:
            raise SolveError(
                f"layer {problem.name}: AWQ needs the layer's activations, and none were collected"
            )
        config = problem.config
        magnitude = np.sqrt(np.diag(problem.hessian))
        best: tuple[float, float, ChannelScale, dict[str, object]] | None = None
        for power in POWERS:
            scale = ChannelScale(channel_scale(magnitude, power))
            folded = scale.fold(problem.target)
            result = native.rtn(
                folded,
                bits=config.bits,
                group_size=core_group_size(config),
                symmetric=config.symmetric,
                scale_dtype=core_scale_dtype(config),
                scale_search=config.scale_search,
                threads=problem.threads,
            )
            width = folded.shape[1] if config.group_size == -1 else config.group_size
            rounded = native.dequantize(result["codes"], result["scales"], result["zeros"], width)
            loss = native.proxy(
                problem.target, scale.unfold(rounded), problem.hessian, threads=problem.threads
            )
            if best is None or loss < best[0]:
                best = (loss, power, scale, result)
        assert best is not None
        _, power, scale, result = best
        layer = layer_from(problem, result, "awq").with_report(awq_power=power)
        return layer.with_transform(scale) if power > 0 else layer


def channel_scale(magnitude: NDArray[np.float64], power: float) -> NDArray[np.float32]:
    """s = a^p over the geometric mean of its extremes; 1 for channels without activation. float16 values."""
    live = magnitude > 0
    scale = np.where(live, np.where(live, magnitude, 1.0) ** power, np.nan)
    if not live.any():
        return np.ones(len(magnitude), dtype=np.float32)
    scale = scale / np.sqrt(np.nanmax(scale) * np.nanmin(scale))
    stored: NDArray[np.float32] = np.where(live, scale, 1.0).astype(np.float16).astype(np.float32)
    return np.maximum(stored, np.float32(2.0**-14))


QUANTIZERS.register("awq")(AWQ())
