"""Modules over made codes."""

from __future__ import annotations

from typing import Any

import numpy as np

from loopq.inference.linear import QuantLinear
from loopq.layers.grids import grid_of
from loopq.layers.layer import QuantizedLayer


def linear_of(
    codes: np.ndarray, scales: np.ndarray, group_size: int, bits: int, bias: Any = None, *,
    zeros: np.ndarray | None = None, transform: Any = None, trellis: Any = None, **more: Any,
) -> QuantLinear:  # fmt: skip
    """A module over codes of a grid that is symmetric where there are no zero points; `more` as of `from_layer`."""
    own = {} if trellis is None else {"trellis": trellis}
    grid = grid_of(bits=bits, group_size=group_size, symmetric=zeros is None, scale_dtype="float32", **own)
    layer = QuantizedLayer("layer.weight", grid, codes, scales, zeros, transform=transform)
    return QuantLinear.from_layer(layer, bias, **more)
