"""One quantized layer: codes, scales, and what was done to get them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.errors import CheckpointError
from loopq.layers.grid import BITS, SCALE_DTYPES
from loopq.layers.transforms import Transform, from_description
from loopq.storage.files import DTYPE_NAMES, ITEM_SIZE, RawTensor, float_to_raw
from loopq.storage.schema import Allowed, Count, Name, Object, Positive, between, checked, shown

Bits = Annotated[int, Allowed(", ".join(map(str, BITS)), BITS.__contains__)]
ScaleType = Annotated[str, Allowed(", ".join(SCALE_DTYPES), SCALE_DTYPES.__contains__)]
GroupSize = Annotated[int, Allowed("-1 or 1 to 2147483647", lambda n: n == -1 or 0 < n < 1 << 31)]


@dataclass(frozen=True)
class Trellis:
    """How codes stand for values where these depend on several codes (docs/formats/trellis.md).

    Parameters
    ----------
    state_bits : int
        Bits of a stream that a value depends on.
    stream_rows : int
        Outputs that a stream of one column runs over, before the next one begins.
    function : {"1mad"}
        Value of a state x: the bytes of 34038481 x + 76625530 mod 2^32 added, less 510, over 128.
    """

    state_bits: Annotated[int, between(4, 16)]
    stream_rows: Positive
    function: Literal["1mad"] = "1mad"


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """What an index says of a layer; `QuantizedLayer` describes the fields."""

    name: Name
    bits: Bits
    group_size: GroupSize
    symmetric: bool
    scale_dtype: ScaleType
    orientation: Literal["out_in", "in_out", "table"] = "out_in"
    shape: tuple[Positive, Positive]
    transform: Object | None = None
    trellis: Trellis | None = None


@dataclass(frozen=True)
class _Rotation:
    type: Literal["rotation"]
    kind: Literal["hadamard", "random"]
    dim: Positive
    block: Positive
    seed: Count
    made: dict[str, str]


@dataclass(frozen=True)
class TensorReader:
    """The tensors of a file (`where`, for messages), handed out only as they are expected; `used`: those that were."""

    where: str
    tensors: Mapping[str, RawTensor]
    used: set[str] = field(default_factory=set)

    def get(self, name: str, dtypes: Sequence[str], shape: Sequence[int | None]) -> RawTensor:
        """Return a tensor; None in `shape` lets that dimension be any.

        Raises
        ------
        CheckpointError
            It is missing, or of another type or shape.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.where}: tensor {name!r} is missing")
        tensor = self.tensors[name]
        same = [want in (None, got) for want, got in zip(shape, tensor.shape, strict=False)]
        if tensor.dtype not in dtypes or len(tensor.shape) != len(shape) or not all(same):
            wanted = [n if n is not None else "any" for n in shape]
            raise CheckpointError(
                f"{self.where}: tensor {name!r} is {tensor.dtype} {shown(list(tensor.shape))}; "
                f"expected {' or '.join(dtypes)} {wanted}"
            )
        self.used.add(name)
        return tensor

    def scales(
        self, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = ("F16", "BF16", "F32")
    ) -> NDArray[np.float32]:
        """Return scales, which must be finite and not zero."""
        values = self.get(name, dtypes, shape).float32()
        if not np.isfinite(values).all() or (values == 0).any():
            raise CheckpointError(f"{self.where}: tensor {name!r} holds a scale that is zero or not finite")
        return values

    def codes(
        self, name: str, bits: int, count: int, n_streams: int, *, offset: int = 0, down: bool = False
    ) -> NDArray[Any]:
        """Unpack bit streams of `count` codes each, I32, shape (n_streams, ceil(count * bits / 32)).

        `offset` is subtracted from every code: 0 gives uint8, 2^(bits-1) signed codes in int8. With `down` the streams
        run down the columns: the tensor is transposed. The result has shape (n_streams, count).

        Raises
        ------
        CheckpointError
            Bits after the last code are not zero: the shape or the bits are not what the file was written with.
        """
        shape = (n_streams, -(-count * bits // 32))
        stored = self.get(name, ("I32",), shape[::-1] if down else shape).array()
        words = np.ascontiguousarray(stored.T if down else stored)
        used = count * bits % 32
        rest = words[:, -1].view(np.uint32) >> np.uint32(used) if used else np.zeros(0)
        if rest.any():
            raise CheckpointError(
                f"{self.where}: tensor {name!r}: row {np.flatnonzero(rest)[0]} has bits after its last code: "
                f"{count} codes of {bits} bits do not fill it so"
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
    orientation : {"out_in", "in_out", "table"}
        How the model stores the weight: outputs first, inputs first, or as an embedding table with rows looked up.
    report : mapping of str to Any
        What was asked, what was done, and what it cost.
    transform : Transform, optional
        Change of the input's basis that the codes are for (`loopq.layers.transforms`); only the native format holds it.
    trellis : Trellis, optional
        How codes stand for values where that is not code times scale; only the native format holds it.
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
    trellis: Trellis | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> NDArray[np.float32]:
        """Return the weight for the layer's plain input, float32, shape (out_features, in_features)."""
        values = self.stored_values()
        return values if self.transform is None else self.transform.unfold(values)

    def stored_values(self) -> NDArray[np.float32]:
        """Return the weight for the transformed input; without a transform that is the plain one.

        It is (code - zero) * scale, or with a trellis the value of the codes' state times the scale.
        """
        width = self.shape[1] if self.group_size == -1 else self.group_size
        out: NDArray[np.float32]
        if self.trellis is None:
            out = native.dequantize(self.codes, self.scales, self.zeros, width)
        else:
            out = native.trellis_decode(
                self.codes, self.scales, bits=self.bits, group_size=width,
                state_bits=self.trellis.state_bits, stream_rows=self.trellis.stream_rows,
            )  # fmt: skip
        return out

    @property
    def n_bytes(self) -> int:
        """Bytes of `tensors` without the shape, counted without packing anything."""
        rows, columns = self.shape
        words = rows * -(-columns * self.bits // 32)
        if self.zeros is not None:
            words += self.scales.shape[1] * -(-rows * self.bits // 32)
        n_bytes = 4 * words + ITEM_SIZE[DTYPE_NAMES[self.scale_dtype]] * self.scales.size
        if self.transform is not None:
            n_bytes += sum(ITEM_SIZE["F16"] * a.size for a in self.transform.arrays().values())
        return n_bytes

    @property
    def module(self) -> str:
        """Name of the module that holds the weight."""
        return self.name.removesuffix(".weight")

    @property
    def model_shape(self) -> tuple[int, ...]:
        """Shape of the weight as the model stores it."""
        return self.shape[::-1] if self.orientation == "in_out" else self.shape

    def in_model_orientation(self) -> NDArray[np.float32]:
        """Return the dequantized weight as the model stores it, float32, C-contiguous."""
        values = self.dequantize()
        return np.ascontiguousarray(values.T) if self.orientation == "in_out" else values

    def tensors(self) -> dict[str, RawTensor]:
        """Return the stored tensors: names as of compressed-tensors, layout in docs/formats/checkpoint.md."""
        offset = 1 << (self.bits - 1) if self.symmetric else 0
        packed = native.pack_dense(self.codes, self.bits, offset)
        out = {
            "weight_packed": RawTensor.of(packed),
            "weight_scale": float_to_raw(self.scales, DTYPE_NAMES[self.scale_dtype]),
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
        return (
            {
                "name": self.name,
                "bits": self.bits,
                "group_size": self.group_size,
                "symmetric": self.symmetric,
                "scale_dtype": self.scale_dtype,
                "orientation": self.orientation,
                "shape": list(self.shape),
            }
            | ({} if self.transform is None else {"transform": self.transform.describe()})
            | ({} if self.trellis is None else {"trellis": dataclasses.asdict(self.trellis)})
        )

    @classmethod
    def from_tensors(
        cls, settings: LayerSettings, reader: TensorReader, report: Mapping[str, Any]
    ) -> QuantizedLayer:
        """Rebuild a layer from its stored tensors, checking every shape, dtype and code range.

        Raises
        ------
        CheckpointError
            Names the file and the tensor.
        """
        rows, columns = settings.shape
        bits, group = settings.bits, settings.group_size
        module = settings.name.removesuffix(".weight")
        n_groups = 1 if group == -1 else -(-columns // group)
        shape = reader.get(f"{module}.weight_shape", ("I64", "I32"), (2,)).array().tolist()
        if shape != [rows, columns]:
            stated = f"'{module}.weight_shape' says {shape}"
            raise CheckpointError(f"{reader.where}: tensor {stated}, expected {[rows, columns]}")
        offset = 1 << (bits - 1) if settings.symmetric else 0
        codes = reader.codes(f"{module}.weight_packed", bits, columns, rows, offset=offset)
        kind = DTYPE_NAMES[settings.scale_dtype]
        scales = reader.scales(f"{module}.weight_scale", (rows, n_groups), [kind])
        zeros = None
        if not settings.symmetric:
            stored = reader.codes(f"{module}.weight_zero_point", bits, rows, n_groups, down=True)
            zeros = np.ascontiguousarray(stored.T)
        return cls(
            settings.name, bits, group, settings.symmetric, codes, scales, zeros, settings.scale_dtype,
            settings.orientation, dict(report), _transform(settings, reader),
            _trellis(settings, reader.where),
        )  # fmt: skip

    def same_as(self, other: QuantizedLayer) -> bool:
        """Whether codes, scales and zero points are equal, bit for bit."""
        zeros = (self.zeros is None) == (other.zeros is None) and (
            self.zeros is None or other.zeros is None or np.array_equal(self.zeros, other.zeros)
        )
        return (
            np.array_equal(self.codes, other.codes)
            and np.array_equal(self.scales, other.scales)
            and zeros
            and self.trellis == other.trellis
            and _same_transform(self.transform, other.transform)
        )

    def with_report(self, **more: Any) -> QuantizedLayer:
        """Return the layer with more in its report."""
        return dataclasses.replace(self, report={**self.report, **more})

    def with_transform(self, transform: Transform) -> QuantizedLayer:
        """Return the layer for another basis of its input."""
        return dataclasses.replace(self, transform=transform)


def _transform(settings: LayerSettings, reader: TensorReader) -> Transform | None:
    """Rebuild the change of a layer's input basis, which must be the one that its description says."""
    told, arrays = settings.transform, {}
    if told is None:
        return None
    columns = settings.shape[1]
    where = f"{reader.where}: layer {settings.name}: transform"
    if told == {"type": "channel_scale"}:
        name = f"{settings.name.removesuffix('.weight')}.input_scale"
        arrays["input_scale"] = reader.scales(name, (columns,), ["F16"])
    else:
        # A rotation is made anew, and takes the square of its block in memory.
        rotation = checked(_Rotation, told, where)
        if rotation.dim != columns or rotation.block > columns:
            raise CheckpointError(f"{where}: {shown(told)} for a layer of {columns} inputs")
    found = from_description(told, arrays)
    if found.describe() != told:
        raise CheckpointError(f"{where}: {shown(told)}; this loopq makes another: {shown(found.describe())}")
    return found


def _trellis(settings: LayerSettings, where: str) -> Trellis | None:
    """Refuse a trellis that no codes of such a grid can be on."""
    found = settings.trellis
    if found and (settings.bits == 8 or not settings.symmetric or found.state_bits < settings.bits + 2):
        kind = f"{settings.bits} bits{'' if settings.symmetric else ', asymmetric'}"
        raise CheckpointError(f"{where}: layer {settings.name}: {found} for {kind}")
    return found


def _same_transform(a: Transform | None, b: Transform | None) -> bool:
    if a is None or b is None:
        return a is b
    mine, theirs = a.arrays(), b.arrays()
    same = mine.keys() == theirs.keys() and all(np.array_equal(mine[k], theirs[k]) for k in mine)
    return same and a.describe() == b.describe()
