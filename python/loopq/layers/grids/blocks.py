"""GGUF types with group scales in shared units, or with offsets. Layout: docs/formats/gguf.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.errors import CheckpointError, ConfigError
from loopq.layers.grid import Arrays, BlockType, Grid, ScaleSearch
from loopq.layers.grids import GRIDS, LEVELS
from loopq.layers.grids.integer import Integer
from loopq.layers.grids.planes import Bytes, Half, Plane, Sixes
from loopq.layers.grids.table import PARTS, UNEVEN, Table
from loopq.layers.reader import TensorReader
from loopq.storage.files import RawTensor
from loopq.storage.schema import Allowed


@dataclass(frozen=True)
class Kind:
    """One type: its codes, its groups and the layout of a block.

    Parameters
    ----------
    file : (int, int)
        Number and place of a file of the type (`BlockType`).
    bits, group_size, size : int
        Bits of a code, weights of a group and of a block.
    scales : (int, int)
        Smallest and largest number of units of a scale.
    offsets : int
        Largest number of units of an offset. With 0 values have no offset, and codes are signed.
    parts : tuple
        Parts of a block in order, with their planes. "scale" and "offset" are the units; "less" is a negated offset
        unit. "codes" are the codes. "numbers" are the numbers of units, of scales first, then of offsets.
    raised : int
        Amount that reading adds to the file's numbers of units of scales.
    table : bool
        Whether codes stand for the levels of IQ4_NL.
    """

    file: tuple[int, int]
    bits: int
    group_size: int
    size: int
    scales: tuple[int, int]
    offsets: int
    parts: tuple[tuple[str, Any], ...]
    raised: int = 0
    table: bool = False

    @property
    def groups(self) -> int:
        """Groups of a block."""
        return self.size // self.group_size

    @property
    def unit(self) -> int:
        """Quotient of the unit of scales and the file's unit."""
        return PARTS if self.table else 1

    @property
    def n_bytes(self) -> int:
        """Bytes of a block."""
        return sum(plane.size(self.count(what)) for what, plane in self.parts)

    def count(self, what: str) -> int:
        """Number of codes or numbers in a block."""
        return self.size if what == "codes" else self.groups * (1 + (self.offsets > 0))


def _codes(*planes: Plane) -> tuple[tuple[str, Plane], ...]:
    return tuple(("codes", plane) for plane in planes)


_D, _M, _LESS, _SIXES = ("scale", Half()), ("offset", Half()), ("less", Half()), ("numbers", Sixes())
_LOW, _LOW_K, _LOW_2, _HIGH = Plane(0, 4, 32), Plane(0, 4, 64), Plane(0, 2, 128), Plane(4, 1, 8)
_ONE, _SIX, _SIGNED = (1, 1), (0, 63), (-32, 31)
KINDS = {
    "q4_1": Kind((3, 45), 4, 32, 32, _ONE, 1, (_D, _M, *_codes(_LOW))),
    "q5_0": Kind((8, 50), 5, 32, 32, _ONE, 0, (_D, *_codes(_HIGH, _LOW))),
    "q5_1": Kind((9, 52), 5, 32, 32, _ONE, 1, (_D, _M, *_codes(_HIGH, _LOW))),
    "q2_k": Kind((10, 21), 2, 16, 256, (0, 15), 15, (("numbers", _LOW), *_codes(_LOW_2), _D, _LESS)),
    "q3_k": Kind(
        (11, 30), 3, 16, 256, _SIGNED, 0,
        (*_codes(Plane(2, 1, 256), _LOW_2), ("numbers", Plane(0, 4, 16)), ("numbers", Plane(4, 2, 16)), _D), -32,
    ),
    "q4_k": Kind((14, 43), 4, 32, 256, _SIX, 63, (_D, _LESS, _SIXES, *_codes(_LOW_K))),
    "q5_k": Kind((16, 51), 5, 32, 256, _SIX, 63, (_D, _LESS, _SIXES, *_codes(Plane(4, 1, 256), _LOW_K))),
    "q6_k": Kind(
        (18, 60), 6, 16, 256, (-128, 127), 0,
        (*_codes(Plane(0, 4, 128), Plane(4, 2, 128)), ("numbers", Plane(0, 8, 1)), _D)
    ),
    "iq4_xs": Kind(
        (30, 40), 4, 32, 256, _SIGNED, 0,
        (_D, ("numbers", Plane(4, 2, 4)), ("numbers", Plane(0, 4, 2)), *_codes(_LOW)), -32, True
    ),
}  # fmt: skip
_Name = Annotated[str, Allowed(", ".join(KINDS), KINDS.__contains__)]


@GRIDS.register("gguf")
@dataclass(frozen=True)
class Blocks(Grid):
    """Codes times their group's scale, plus an offset. Both are whole multiples of a unit of the block.

    Parameters
    ----------
    block : str
        Name of the type in lower case.
    """

    block: _Name

    portable: ClassVar[bool] = False
    own_scales: ClassVar[bool] = False
    scale_dtypes: ClassVar[tuple[str, ...]] = ("float16",)
    zeros_dtype: ClassVar[type[np.generic]] = np.float32

    def __post_init__(self) -> None:
        known = self.facts
        if (self.bits, self.group_size, self.scale_dtype) != (known.bits, known.group_size, "float16"):
            raise ConfigError(
                f"{self.label} has {known.bits} bits, groups of {known.group_size} and scales in float16; got "
                f"{self.bits} bits, groups of {self.group_size} and {self.scale_dtype}"
            )

    @property
    def facts(self) -> Kind:
        """Properties of the type."""
        return KINDS[self.block]

    @property
    def symmetric(self) -> bool:  # type: ignore[override]  # of a type, not of the class
        """Whether values have no offset."""
        return self.facts.offsets == 0

    @property
    def label(self) -> str:
        """Name in reports."""
        return self.block.upper()

    @property
    def gguf(self) -> BlockType:
        """The type."""
        return BlockType(self.label, *self.facts.file)

    @property
    def gguf_width(self) -> int:
        """Weights of a group."""
        return self.group_size

    @property
    def panels(self) -> bool:
        """Whether scales alone determine the values, with bits that the CPU layout supports."""
        return self.symmetric and self.bits <= 4

    @property
    def levels(self) -> NDArray[np.float32] | None:
        """Levels of IQ4_NL for types with uneven levels; None for the others."""
        return Table(4, 32, "float16", UNEVEN[4]).levels if self.facts.table else None

    def check_columns(self, columns: int) -> None:
        """Refuse rows that are not whole blocks."""
        if columns % self.facts.size:
            raise ConfigError(
                f"{self.label} has blocks of {self.facts.size} weights, and {columns} columns are no whole number of "
                "them; take another type for these layers, such as --layer 'PATTERN=>levels=q5_0', or --exclude them"
            )

    def core(
        self,
        *,
        scale_search: ScaleSearch = "max",
        signed: bool = False,
        scale_bits: int | None = None,
        scale_dtype: str | None = None,
    ) -> native.Grid:
        """As in `Grid`. With a scale type, return the grid of products, in which every group has its own scale."""
        if scale_bits is not None:
            raise ConfigError(f"{self.label} has scales of its own: leave --set scale_bits=... out")
        if scale_dtype is not None:
            return native.Grid(
                bits=self.bits,
                group_size=self.group_size,
                scale_dtype=scale_dtype,
                signed=True,
                **self._table(),
            )
        return super().core()

    def _native(self) -> dict[str, Any]:
        known = self.facts
        return {"units": (known.groups, known.scales, known.offsets, known.unit), **self._table()}

    def _table(self) -> dict[str, Any]:
        return {"levels": list(UNEVEN[4])} if self.facts.table else {}

    def _check_zeros(self, zeros: NDArray[Any] | None, expected: tuple[int, ...]) -> None:
        if self.symmetric:
            super()._check_zeros(zeros, (expected[0], expected[1]))
        elif zeros is None or zeros.shape != expected or zeros.dtype != np.float32:
            got = "missing" if zeros is None else f"{zeros.dtype} of shape {zeros.shape}"
            raise ConfigError(f"offsets are {got}; expected float32 {expected}, in the place of zero points")

    def n_bytes(self, rows: int, columns: int) -> int:
        """Bytes of `tensors` without the shape."""
        return rows * columns // self.facts.size * self.facts.n_bytes

    def gguf_data(
        self, codes: NDArray[Any], scales: NDArray[np.float32], zeros: NDArray[Any] | None
    ) -> Bytes:
        """Return the blocks (out, bytes)."""
        known, (rows, columns) = self.facts, codes.shape
        self.check_columns(columns)
        unit, numbers = _counted(scales.reshape(-1, known.groups), known.scales, known.unit)
        parts: dict[str, NDArray[Any]] = {
            "codes": (codes + np.array(self.offset, codes.dtype)).astype(np.uint8).reshape(-1, known.size),
            "scale": unit / np.float32(known.unit),
        }
        numbers -= known.raised
        if zeros is not None:
            limits = int(known.groups == 1), known.offsets
            parts["offset"], more = _counted(zeros.reshape(-1, known.groups), limits)
            parts["less"], numbers = -parts["offset"], np.hstack([numbers, more])
        parts["numbers"] = numbers.astype(np.int8).view(np.uint8)
        return np.hstack([plane.pack(parts[what]) for what, plane in known.parts]).reshape(rows, -1)

    def from_gguf(self, data: Bytes) -> Arrays:
        """Return codes, scales and offsets of blocks (out, bytes)."""
        known, rows = self.facts, len(data)
        flat, at = data.reshape(-1, known.n_bytes), 0
        parts: dict[str, NDArray[Any]] = {}
        for what, plane in known.parts:
            size = plane.size(known.count(what))
            piece, at = plane.unpack(np.ascontiguousarray(flat[:, at : at + size])), at + size
            parts[what] = parts[what] | piece if what in parts else piece
        codes = (parts["codes"].astype(np.int16) - self.offset).astype(self.dtype).reshape(rows, -1)
        one = np.ones((len(flat), 1), np.int8)
        numbers = parts["numbers"].view(np.int8) if known.groups > 1 else np.hstack([one - known.raised, one])
        counts = numbers[:, : known.groups] + np.int8(known.raised)
        scales = (parts["scale"] * np.float32(known.unit) * counts).reshape(rows, -1)
        zeros = None
        if known.offsets:
            unit = parts["offset"] if "offset" in parts else -parts["less"]
            zeros = (unit * numbers[:, known.groups :]).reshape(rows, -1)
        return codes, scales, zeros

    def tensors(
        self, codes: NDArray[Any], scales: NDArray[np.float32], zeros: NDArray[Any] | None
    ) -> dict[str, RawTensor]:
        """Return the GGUF blocks and the shape."""
        return {
            "weight_packed": RawTensor.of(self.gguf_data(codes, scales, zeros)),
            "weight_shape": RawTensor.of(np.array(codes.shape, dtype=np.int64)),
        }

    def read(self, reader: TensorReader, module: str, rows: int, columns: int) -> Arrays:
        """Read the result of `tensors`."""
        name = f"{module}.weight_packed"
        if columns % self.facts.size:
            raise CheckpointError(f"{reader.where}: tensor {name!r}: {columns} columns in {self.label}")
        with np.errstate(invalid="ignore"):  # said below
            arrays = self.from_gguf(reader.get(name, ("U8",), (rows, self.n_bytes(1, columns))).array())
        if not all(np.isfinite(numbers).all() for numbers in arrays[1:] if numbers is not None):
            raise CheckpointError(
                f"{reader.where}: tensor {name!r} holds a scale or an offset that is not finite"
            )
        return arrays


def _counted(
    values: NDArray[np.float32], limits: tuple[int, int], parts: int = 1
) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
    """Return units (n,) and the numbers (n, groups) of them in the values. float16 holds a unit over `parts`.

    Raises
    ------
    CheckpointError
        The values are not multiples of such units.
    """
    top = values[np.arange(len(values)), np.abs(values).argmax(1)]
    unit, left = np.zeros_like(top), np.flatnonzero(top)
    for count in sorted((n for n in range(limits[0], limits[1] + 1) if n), key=abs, reverse=True):
        tried = top[left] / np.float32(count)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            numbers = np.rint(values[left] / tried[:, None])
            good = (tried / parts).astype(np.float16) == tried / parts
        good &= (numbers * tried[:, None] == values[left]).all(1)
        good &= (numbers >= min(limits[0], 0)).all(1) & (numbers <= limits[1]).all(1)
        unit[left[good]], left = tried[good], left[~good]
    if left.size:
        raise CheckpointError(
            f"scales or offsets of a block are no whole numbers of a float16: {values[left[0]]}"
        )
    numbers = np.rint(values / np.where(unit == 0, 1, unit)[:, None]).astype(np.int16)
    return unit, numbers


def _blocks(kind: str, bits: int, group_size: int, scale_dtype: str) -> Grid:
    """Return the grid of a type. The type determines bits and groups."""
    return Blocks(KINDS[kind].bits, KINDS[kind].group_size, scale_dtype, kind)


def _simple(make: Callable[[], Grid], bits: int, group_size: int, scale_dtype: str) -> Grid:
    return make()


for _kind in KINDS:
    LEVELS.register(_kind)(partial(_blocks, _kind))
for _kind, _bits, _size in (("q2_0", 2, 64), ("q4_0", 4, 32), ("q8_0", 8, 32)):
    LEVELS.register(_kind)(partial(_simple, partial(Integer, _bits, _size, "float16")))
LEVELS.register("iq4_nl")(partial(_simple, partial(Table, 4, 32, "float16", UNEVEN[4])))
