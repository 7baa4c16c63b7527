"""Modules over made codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from loopq.layers.grids import even
from loopq.layers.grids.table import Table
from loopq.layers.grids.trellis import OnTrellis
from loopq.layers.layer import QuantizedLayer
from loopq.runtime.linear import QuantLinear
from tests.support import core


def linear_of(
    codes: np.ndarray, scales: np.ndarray, group_size: int, bits: int, bias: Any = None, *,
    zeros: np.ndarray | None = None, transform: Any = None, trellis: Any = None, levels: Any = None, **more: Any,
) -> QuantLinear:  # fmt: skip
    """A module over codes of a grid that is symmetric where there are no zero points; `more` as of `from_layer`."""
    grid = even(bits=bits, group_size=group_size, symmetric=zeros is None, scale_dtype="float32")
    if trellis is not None:
        grid = OnTrellis(bits, group_size, "float32", trellis)
    elif levels is not None:
        grid = Table(bits, group_size, "float32", tuple(levels))
    layer = QuantizedLayer("layer.weight", grid, codes, scales, zeros, transform=transform)
    return QuantLinear.from_layer(layer, bias, **more)


def asymmetric(bits=3, rows=6, columns=20, group_size=8, seed=0):
    """Arguments of `linear_of` for a layer with zero points, and its weight in float64."""
    rng = np.random.default_rng(seed)
    groups = 1 if group_size == -1 else -(-columns // group_size)
    codes = rng.integers(0, 1 << bits, (rows, columns)).astype(np.uint8)
    zeros = rng.integers(0, 1 << bits, (rows, groups)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.2, (rows, groups)).astype(np.float16).astype(np.float32)
    index = np.arange(columns) // (columns if group_size == -1 else group_size)
    weight = (codes.astype(float) - zeros[:, index]) * scales[:, index]
    return {
        "codes": codes, "scales": scales, "group_size": group_size, "bits": bits, "zeros": zeros,
    }, weight  # fmt: skip


def coded(system, bits=4, transform=None, group_size=16, trellis=None, **settings):
    """The system with codes in the place of its shared linear layers, rounded to nearest in groups of 16.

    `transform` gives the transform of so many inputs, or none. Codes on a trellis are drawn at random.
    """
    for shared in system.shared_parameters(system.n_steps):
        name = shared.name.removesuffix(".weight")
        linear = system.model.get_submodule(name)
        weight = linear.weight.detach().float().numpy()
        basis = None if transform is None else transform(weight.shape[1])
        if basis is not None:
            weight = basis.fold(weight)
        if trellis is None:
            solved = core.rtn(weight, bits=bits, group_size=group_size)
        else:
            solved = _drawn(weight, bits, group_size)
        parent, _, child = name.rpartition(".")
        packed = linear_of(
            solved["codes"],
            solved["scales"],
            group_size,
            bits,
            linear.bias,
            layout="lq-cpu",
            scale_dtype=torch.float32,
            transform=basis,
            trellis=trellis,
            **settings,
        )
        setattr(system.model.get_submodule(parent), child, packed)
    return system


def _drawn(weight, bits, group_size):
    """Codes at random with scales of about a weight's size."""
    rng = np.random.default_rng(weight.size)
    groups = 1 if group_size == -1 else -(-weight.shape[1] // group_size)
    codes = rng.integers(-1 << (bits - 1), 1 << (bits - 1), weight.shape).astype(np.int8)
    scales = rng.uniform(0.5, 1.0, (len(weight), groups)) * weight.std()
    return {"codes": codes, "scales": scales.astype(np.float32)}
