"""Files of sums: the exact state of a Hessian, and the gradient sums of a loop metric."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.errors import DumpError, LoopqError
from loopq.layers.reader import TensorReader
from loopq.layers.shared import SharedParameter
from loopq.storage.files import RawTensor, read_header, read_tensors, write_tensors
from loopq.storage.schema import Count, Positive, checked, parse_json, shown


@dataclass(frozen=True)
class GradientSums:
    """The arrays of a loop metric (`loopq.quantizers.loop_metric.LoopMetric`).

    Parameters
    ----------
    left : tuple of ndarray, float64
        Blocks of A. Each has consecutive outputs and shape (b, b).
    right : ndarray, float64, shape (in_features, in_features)
        The gradient part of S.
    """

    left: tuple[NDArray[np.float64], ...]
    right: NDArray[np.float64]


@dataclass(frozen=True)
class _HessianState:
    """Metadata of a Hessian file: the state of docs/formats/hessian.md without its arrays."""

    spec_version: Literal[1]
    dim: Positive
    steps: tuple[Count, ...]
    per_step: bool
    n_rows: tuple[Count, ...]


def accumulator_parts(acc: native.HessianAccumulator) -> tuple[dict[str, RawTensor], dict[str, Any]]:
    """Return the exact state of a finished accumulator as arrays and plain data.

    Tensors `hi.<i>` and `lo.<i>`, int64, hold the packed upper triangles (docs/formats/hessian.md). Each separate step
    has its own pair.
    """
    state: dict[str, Any] = dict(acc.state())
    arrays = {
        f"{limb}.{i:03d}": RawTensor.of(values)
        for limb in ("hi", "lo")
        for i, values in enumerate(state.pop(limb))
    }
    return arrays, state


def accumulator_from(
    arrays: Mapping[str, RawTensor], state: Any, where: str, threads: int = 0
) -> native.HessianAccumulator:
    """Rebuild an accumulator from `accumulator_parts`.

    Raises
    ------
    DumpError
        The state is invalid.
    """
    header = checked(_HessianState, state, f"{where}: Hessian state", DumpError)
    reader = TensorReader(where, arrays)
    entries = header.dim * (header.dim + 1) // 2
    names = [f"{i:03d}" for i in range(min(len(header.steps), len(arrays)) if header.per_step else 1)]
    whole: dict[str, Any] = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(header).items()}
    try:
        for limb in ("hi", "lo"):
            whole[limb] = [reader.get(f"{limb}.{n}", ["I64"], (entries,)).array() for n in names]
        if reader.used != set(arrays):
            raise DumpError("tensors that are no part of it")
        return native.HessianAccumulator.from_state(cast(Any, whole), threads=threads)
    except (LoopqError, TypeError, ValueError, OverflowError) as cause:
        raise DumpError(f"{where}: damaged Hessian state: {cause}") from cause


def write_accumulator(path: Path, acc: native.HessianAccumulator) -> str:
    """Write the exact state of a finished accumulator and return the SHA-256 of the file.

    Everything except the arrays is JSON under the metadata key "loopq_hessian".
    """
    arrays, state = accumulator_parts(acc)
    return write_tensors(path, arrays, {"loopq_hessian": json.dumps(state, sort_keys=True)})


def read_accumulator(path: Path, *, threads: int = 0) -> native.HessianAccumulator:
    """Read the exact state of an accumulator.

    Raises
    ------
    DumpError
        The file is of another kind, truncated, or has an invalid state.
    """
    _, metadata = read_header(path, DumpError)
    state = parse_json(metadata.get("loopq_hessian", "null"), path, DumpError)
    return accumulator_from(read_tensors(path, DumpError), state, str(path), threads)


def write_gradient_sums(path: Path, sums: GradientSums) -> str:
    """Write the sums of a loop metric, tensors `left.<i>` and `right`. Return the SHA-256 of the file."""
    arrays = {f"left.{i:05d}": a for i, a in enumerate(sums.left)} | {"right": sums.right}
    return write_tensors(path, {name: RawTensor.of(a) for name, a in arrays.items()})


def gradient_sums_from(
    arrays: Mapping[str, RawTensor], parameter: SharedParameter, where: str
) -> GradientSums:
    """Read the result of `write_gradient_sums`.

    Raises
    ------
    DumpError
        A tensor has another type or shape, or an entry that is impossible for a sum of squares.
    """
    reader = TensorReader(where, arrays)
    width = parameter.in_features
    try:
        left = []
        for i in range(len(arrays) - 1):
            side = (arrays.get(f"left.{i:05d}", RawTensor("F64", (), np.zeros(0, np.uint8))).shape or (0,))[0]
            left.append(reader.get(f"left.{i:05d}", ["F64"], (side, side)).array())
        # Experts that share one side have nothing on the other.
        if parameter.routed_in and left and "right" in arrays and tuple(arrays["right"].shape) == (0, 0):
            width = 0
        right = reader.get("right", ["F64"], (width, width)).array()
    except LoopqError as cause:
        raise DumpError(str(cause)) from cause
    if sum(len(a) for a in left) != parameter.out_features and (left or not parameter.routed_in):
        raise DumpError(
            f"{where}: blocks of {shown([len(a) for a in left])} outputs; the layer has "
            f"{parameter.out_features}"
        )
    for a in (*left, right):
        if not np.isfinite(a).all() or (np.diag(a) < 0).any():
            raise DumpError(f"{where}: damaged loop metric: an entry that no sum of squares can have")
    return GradientSums(tuple(left), right)
