"""No quantization: the layer keeps its full precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loopq.errors import ConfigError
from loopq.layers.layer import QuantizedLayer
from loopq.quantizers import QUANTIZERS, Method, Problem


@QUANTIZERS.register("dense")
@dataclass(frozen=True)
class Dense(Method):
    """Leave the layer in full precision."""

    needs_hessian: ClassVar[bool] = False

    def quantize(self, problem: Problem) -> QuantizedLayer:
        """Refuse: a dense layer has no codes."""
        raise ConfigError(f"layer {problem.name}: method 'dense' leaves a layer as it is")
