"""One quantized layer: codes, scales, and what was done to get them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.checkpoint.files import ITEM_SIZE, RawTensor, float_to_raw
from loopq.errors import CheckpointError
from loopq.grid import BITS, SCALE_DTYPES
from loopq.rotation import Transform, from_description

_SCALE_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def unpack_codes(packed: NDArray[np.int32], bits: int, count: int, offset: int, what: str) -> NDArray[Any]:
    """Unpack the bit stream of every row.

    Parameters
    ----------
    packed : ndarray, int32, shape (rows, ceil(count * bits / 32))
        Words.
    bits, count : int
        Bits of a code and codes of a row.
    offset : int
        Subtracted from every code: 0 gives uint8, 2^(bits-1) gives the signed codes in int8.
    what : str
        File and tensor, for the message.

    Raises
    ------
    CheckpointError
        Bits after the last code are not zero: the shape or the bits are not what the file was written with.
    """
    used = count * bits % 32
    words = np.ascontiguousarray(packed)
    if used and words.size and (words[:, -1].view(np.uint32) >> np.uint32(used)).any():
        row = int(np.flatnonzero(words[:, -1].view(np.uint32) >> np.uint32(used))[0])
        raise CheckpointError(
            f"{what}: row {row} has bits after its last code: {count} codes of {bits} bits do not fill it so"
        )
    codes: NDArray[Any] = native.unpack_dense(words, bits, count, offset)
    return codes


@dataclass(frozen=True)
class QuantizedLayer:
    """A weight matrix on an integer grid.

    Parameters
    ----------
    name : str
        Name of the parameter ("transformer.adapter.weight").
    bits : int
        2, 3, 4 or 8.
    group_size : int
        Input columns of a scale; -1 is one scale per output row.
    symmetric : bool
        Signed codes in [-2^(b-1), 2^(b-1)-1], or codes in [0, 2^b-1] with zero points.
    codes : ndarray, int8 (symmetric) or uint8, shape (out_features, in_features)
        Integer codes.
    scales : ndarray, float32, shape (out_features, n_groups)
        Scales, already rounded to `scale_dtype`.
    zeros : ndarray, uint8, shape (out_features, n_groups), or None
        Zero points of an asymmetric grid.
    scale_dtype : str
        Stored type of the scales.
    orientation : {"out_in", "in_out"}
        How the model stores the weight.
    report : mapping of str to Any
        What was asked, what was done, and what it cost.
    transform : Transform, optional
        Change of the input's basis that the codes are for (`loopq.rotation`); only the native format holds it.
    """

    name: str
    bits: int
    group_size: int
    symmetric: bool
    codes: NDArray[Any]
    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8] | None
    scale_dtype: str
    orientation: str = "out_in"
    report: Mapping[str, Any] = field(default_factory=dict)
    transform: Transform | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> NDArray[np.float32]:
        """Return (code - zero) * scale for the layer's plain input, float32, shape (out_features, in_features)."""
        values = self.stored_values()
        return values if self.transform is None else self.transform.unfold(values)

    def stored_values(self) -> NDArray[np.float32]:
        """Return (code - zero) * scale for the transformed input; without a transform that is the plain one."""
        width = self.shape[1] if self.group_size == -1 else self.group_size
        out: NDArray[np.float32] = native.dequantize(self.codes, self.scales, self.zeros, width)
        return out

    @property
    def n_bytes(self) -> int:
        """Bytes of `tensors` without the shape, counted without packing anything."""
        rows, columns = self.shape
        words = rows * -(-columns * self.bits // 32)
        if self.zeros is not None:
            words += self.scales.shape[1] * -(-rows * self.bits // 32)
        n_bytes = 4 * words + ITEM_SIZE[_SCALE_NAMES[self.scale_dtype]] * self.scales.size
        if self.transform is not None:
            n_bytes += sum(ITEM_SIZE["F16"] * a.size for a in self.transform.arrays().values())
        return n_bytes

    @property
    def module(self) -> str:
        """Name of the module that holds the weight."""
        return self.name.removesuffix(".weight")

    def in_model_orientation(self) -> NDArray[np.float32]:
        """Return the dequantized weight as the model stores it, float32, C-contiguous."""
        values = self.dequantize()
        return np.ascontiguousarray(values.T) if self.orientation == "in_out" else values

    def tensor_names(self) -> list[str]:
        """Names of `tensors`."""
        keys = ["weight_packed", "weight_scale", "weight_shape"]
        keys += ["weight_zero_point"] if self.zeros is not None else []
        keys += list(self.transform.arrays()) if self.transform is not None else []
        return [f"{self.module}.{key}" for key in keys]

    def tensors(self) -> dict[str, RawTensor]:
        """Return the stored tensors: names as of compressed-tensors, layout in docs/formats/checkpoint.md."""
        offset = 1 << (self.bits - 1) if self.symmetric else 0
        packed = native.pack_dense(self.codes, self.bits, offset)
        out = {
            "weight_packed": RawTensor.of(packed),
            "weight_scale": float_to_raw(self.scales, _SCALE_NAMES[self.scale_dtype]),
            "weight_shape": RawTensor.of(np.array(self.shape, dtype=np.int64)),
        }
        if self.zeros is not None:
            # Zero points are packed along the output dimension, so that a group is a column.
            packed_zeros = native.pack_dense(np.ascontiguousarray(self.zeros.T), self.bits, 0)
            out["weight_zero_point"] = RawTensor.of(np.ascontiguousarray(packed_zeros.T))
        if self.transform is not None:
            # Rounded to float16 where they are made, so that nothing is lost here.
            out |= {name: float_to_raw(a, "F16") for name, a in self.transform.arrays().items()}
        return {f"{self.module}.{key}": tensor for key, tensor in out.items()}

    def settings(self) -> dict[str, Any]:
        """Plain data that, with the tensors, gives the layer back."""
        return {
            "name": self.name,
            "bits": self.bits,
            "group_size": self.group_size,
            "symmetric": self.symmetric,
            "scale_dtype": self.scale_dtype,
            "orientation": self.orientation,
            "shape": list(self.shape),
        } | ({} if self.transform is None else {"transform": self.transform.describe()})

    @classmethod
    def from_tensors(
        cls,
        settings: Mapping[str, Any],
        tensors: Mapping[str, RawTensor],
        report: Mapping[str, Any],
        where: str,
    ) -> QuantizedLayer:
        """Rebuild a layer from its stored tensors, checking every shape, dtype and code range.

        Raises
        ------
        CheckpointError
            Names the file and the tensor.
        """
        check_settings(settings, where)
        fields = {k: v for k, v in settings.items() if k not in ("shape", "transform")}
        rows, columns = (int(n) for n in settings["shape"])
        bits, group = int(settings["bits"]), int(settings["group_size"])
        module = str(settings["name"]).removesuffix(".weight")
        n_groups = 1 if group == -1 else -(-columns // group)

        def get(key: str, dtype: str, shape: tuple[int, ...]) -> RawTensor:
            name = f"{module}.{key}"
            if name not in tensors:
                raise CheckpointError(f"{where}: tensor {name!r} is missing")
            tensor = tensors[name]
            if tensor.dtype != dtype or tensor.shape != shape:
                raise CheckpointError(
                    f"{where}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(shape)}"
                )
            return tensor

        shape = get("weight_shape", "I64", (2,)).array()
        if tuple(int(n) for n in shape) != (rows, columns):
            raise CheckpointError(
                f"{where}: tensor '{module}.weight_shape' says {shape.tolist()}, expected {[rows, columns]}"
            )
        words = -(-columns * bits // 32)
        offset = 1 << (bits - 1) if settings["symmetric"] else 0
        packed = get("weight_packed", "I32", (rows, words)).array()
        codes = unpack_codes(packed, bits, columns, offset, f"{where}: tensor '{module}.weight_packed'")
        scales = get("weight_scale", _SCALE_NAMES[str(settings["scale_dtype"])], (rows, n_groups)).float32()
        if not np.isfinite(scales).all() or (scales == 0).any():
            raise CheckpointError(
                f"{where}: tensor '{module}.weight_scale' holds a scale that is zero or not finite"
            )
        zeros = None
        if not settings["symmetric"]:
            stored = get("weight_zero_point", "I32", (-(-rows * bits // 32), n_groups)).array()
            at = f"{where}: tensor '{module}.weight_zero_point'"
            zeros = np.ascontiguousarray(unpack_codes(stored.T, bits, rows, 0, at).T)
        transform = None
        if "transform" in settings:
            arrays = {}
            if settings["transform"].get("type") == "channel_scale":
                arrays["input_scale"] = get("input_scale", "F16", (columns,)).float32()
            transform = from_description(settings["transform"], arrays)
        return cls(
            **fields, codes=codes, scales=scales, zeros=zeros, report=dict(report), transform=transform
        )

    def same_as(self, other: QuantizedLayer) -> bool:
        """Whether codes, scales and zero points are equal, bit for bit."""
        zeros = (self.zeros is None) == (other.zeros is None) and (
            self.zeros is None or other.zeros is None or np.array_equal(self.zeros, other.zeros)
        )
        return (
            np.array_equal(self.codes, other.codes)
            and np.array_equal(self.scales, other.scales)
            and zeros
            and _same_transform(self.transform, other.transform)
        )

    def with_report(self, **more: Any) -> QuantizedLayer:
        """Return the layer with more in its report."""
        return dataclasses.replace(self, report={**self.report, **more})

    def with_transform(self, transform: Transform) -> QuantizedLayer:
        """Return the layer for another basis of its input."""
        return dataclasses.replace(self, transform=transform)


_ALLOWED: dict[str, tuple[Any, ...]] = {
    "bits": BITS,
    "symmetric": (True, False),
    "scale_dtype": SCALE_DTYPES,
    "orientation": ("out_in", "in_out"),
}


def check_settings(settings: Any, where: str) -> None:
    """Refuse an index entry whose fields are missing, unknown or not allowed."""
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{where}: a layer of the index is not a JSON object")
    name = settings.get("name")
    expected = {"name", "group_size", "shape", *_ALLOWED}
    wrong = sorted((expected ^ set(settings)) - {"transform"})
    if wrong:
        raise CheckpointError(f"{where}: layer {name!r}: missing or unknown in the index: {', '.join(wrong)}")
    for key, allowed in _ALLOWED.items():
        if settings[key] not in allowed:
            raise CheckpointError(
                f"{where}: layer {name!r}: {key} {settings[key]!r} in the index; allowed: {allowed}"
            )
    group, shape = settings["group_size"], settings["shape"]
    if not isinstance(group, int) or (group != -1 and group < 1):
        raise CheckpointError(f"{where}: layer {name!r}: group_size {group!r} in the index")
    if not (isinstance(shape, list) and len(shape) == 2 and all(isinstance(n, int) and n > 0 for n in shape)):
        raise CheckpointError(f"{where}: layer {name!r}: shape {shape!r} in the index")


def _same_transform(a: Transform | None, b: Transform | None) -> bool:
    if a is None or b is None:
        return a is b
    mine, theirs = a.arrays(), b.arrays()
    same = mine.keys() == theirs.keys() and all(np.array_equal(mine[k], theirs[k]) for k in mine)
    return same and a.describe() == b.describe()
