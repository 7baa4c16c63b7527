"""The recipe of CONTRIBUTING for a quantizer: one file for `loopq/quantizers`. Nothing here imports it."""

from __future__ import annotations

from dataclasses import dataclass

from loopq.layers.layer import QuantizedLayer
from loopq.quantizers import QUANTIZERS, Method, Problem
from loopq.quantizers.rtn import round_to_grid
from loopq.settings.declare import setting


@QUANTIZERS.register("madeup")
@dataclass(frozen=True)
class MadeUpMethod(Method):
    """Round a louder weight to nearest.

    Parameters
    ----------
    loudness : float
        What the weight is multiplied by.
    """

    loudness: float = setting(1.0, at_least=0.0)

    def quantize(self, problem: Problem) -> QuantizedLayer:
        """Quantize a layer."""
        problem.require_observed()
        weight = (self.loudness * problem.target).astype("float32")
        return problem.layer(round_to_grid(problem, weight, "max"), self.name)
