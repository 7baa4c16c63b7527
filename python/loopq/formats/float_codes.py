"""Floating-point and byte codes of other tools as float32: FP8, INT8, NVFP4 and MXFP4.

Spec: docs/formats/compressed-tensors.md. A code times its scale is one float32 product, as in other readers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.errors import CheckpointError
from loopq.layers.numbers import e2m1, e4m3, powers
from loopq.storage.files import RawTensor
from loopq.storage.schema import shown

_CODES = ("F8_E4M3", "I8")


def plain(tensors: Mapping[str, RawTensor], where: object) -> dict[str, RawTensor]:
    """Return tensors with such weights as float32, and without their scales.

    Raises
    ------
    CheckpointError
        If scales are missing or have another shape, a product is not finite, or zero points exist, which these formats
        do not have.
    """
    dense = dict(tensors)
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        halves = last == "weight_packed" or f"{module}.weight_scale_2" in tensors
        if not (last == "weight" and tensor.dtype in _CODES) and not (
            last in ("weight", "weight_packed") and tensor.dtype == "U8" and halves
        ):
            continue
        scale = dense.pop(f"{module}.weight_scale", None)
        if scale is None or f"{module}.weight_zero_point" in dense:
            raise CheckpointError(
                f"{where}: tensor {shown(name)}: its scales are missing, or it has zero points"
            )
        outer = dense.pop(f"{module}.weight_global_scale", None)
        factor = dense.pop(f"{module}.weight_scale_2", None)
        for other in ("input_scale", "input_global_scale", "weight_shape"):
            dense.pop(f"{module}.{other}", None)
        del dense[name]
        dense[f"{module}.weight"] = RawTensor.of(
            _values(tensor, scale, (outer, factor), f"{where}: tensor {shown(name)}")
        )
    return dense


def _values(
    tensor: RawTensor, scale: RawTensor, whole: tuple[RawTensor | None, RawTensor | None], where: str
) -> NDArray[np.float32]:
    """Codes times scales. `whole` are a divisor and a factor of all scales."""
    if len(tensor.shape) != 2 or not scale.data.size or any(t and t.shape not in ((), (1,)) for t in whole):
        raise CheckpointError(f"{where}: shape {list(tensor.shape)}, scales {list(scale.shape)}")
    codes = tensor.array()
    decode: dict[str, Callable[[NDArray[Any]], NDArray[np.float32]]] = {"U8": e2m1, "F8_E4M3": e4m3}
    values = decode[tensor.dtype](codes) if tensor.dtype in decode else codes.astype(np.float32)
    if scale.dtype == "F8_E4M3":
        scales = e4m3(scale.array())
    else:
        scales = powers(scale.array()) if scale.dtype == "U8" else scale.float32()
    divisor, factor = whole
    if divisor is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            scales = scales / divisor.float32()
    if factor is not None:
        scales = scales * factor.float32()
    scales = scales.reshape(-1, 1) if scales.ndim == 1 and scales.size > 1 else scales
    scales = scales.reshape(1, 1) if scales.size == 1 else scales
    rows, columns = values.shape
    if scales.ndim != 2 or rows % scales.shape[0] or columns % scales.shape[1]:
        raise CheckpointError(f"{where}: {list(values.shape)} numbers, scales {list(scales.shape)}")
    spread = scales.repeat(rows // scales.shape[0], 0).repeat(columns // scales.shape[1], 1)
    product: NDArray[np.float32] = values * spread
    if not np.isfinite(product).all():
        raise CheckpointError(f"{where}: codes times scales are NaN or infinite; copy the file again")
    return product
