"""Types of GGUF whose groups share units, or whose values have an offset. Layout: docs/formats/gguf.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.errors import CheckpointError, ConfigError
from loopq.layers.grid import Arrays, Grid, ScaleSearch
from loopq.layers.grids import GRIDS, LEVELS
from loopq.layers.grids.integer import Integer
from loopq.layers.grids.table import PARTS, UNEVEN, Table
from loopq.layers.reader import TensorReader
from loopq.storage.files import RawTensor
from loopq.storage.schema import Allowed, checked

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Plane:
    """`bits` of every number, from bit `shift` on: a byte holds them of numbers that lie apart by a part of a chunk."""

    shift: int
    bits: int
    chunk: int

    def pack(self, numbers: Bytes) -> Bytes:
        """Bytes (n, numbers * bits / 8) of numbers (n, numbers)."""
        parts = 8 // self.bits
        kept = numbers >> self.shift & (1 << self.bits) - 1
        apart = kept.reshape(len(numbers), -1, parts, self.chunk // parts)
        return np.bitwise_or.reduce(apart << self._shifts, axis=2).reshape(len(numbers), -1)

    def unpack(self, packed: Bytes) -> Bytes:
        """What `pack` kept, in its place."""
        parts = 8 // self.bits
        apart = packed.reshape(len(packed), -1, 1, self.chunk // parts) >> self._shifts
        return (apart & (1 << self.bits) - 1).reshape(len(packed), -1) << self.shift

    def size(self, n_numbers: int) -> int:
        """Bytes of so many numbers."""
        return n_numbers * self.bits // 8

    @property
    def _shifts(self) -> Bytes:
        return np.arange(0, 8, self.bits, dtype=np.uint8)[:, None]


class Sixes:
    """Eight scales and eight offsets of 6 bits in 12 bytes: low bits of the last four of each, and high bits above others."""

    def pack(self, numbers: Bytes) -> Bytes:
        """Bytes (n, 12) of scales and offsets (n, 16)."""
        first, last = np.split(self._turned(numbers), 2, axis=1)
        return np.hstack([first | last >> 4 << 6, last[:, :4] & 15 | last[:, 4:] << 4])

    def unpack(self, packed: Bytes) -> Bytes:
        """Scales and offsets again."""
        low = np.hstack([packed[:, 8:] & 15, packed[:, 8:] >> 4])
        return self._turned(np.hstack([packed[:, :8] & 63, low | packed[:, :8] >> 6 << 4]))

    def size(self, n_numbers: int) -> int:
        """12."""
        return 12

    @staticmethod
    def _turned(numbers: Bytes) -> Bytes:
        """Quarters in the order 0, 2, 1, 3."""
        return numbers.reshape(-1, 2, 2, 4).swapaxes(1, 2).reshape(-1, 16)


@dataclass(frozen=True)
class Kind:
    """One type: codes, groups and what of them lies where in a block.

    Parameters
    ----------
    bits, group_size, size : int
        Bits of a code, weights of a group and of a block.
    scales : (int, int)
        Least and largest number of units of a scale.
    offsets : int
        Largest number of units of an offset; 0: values have none, and codes are signed.
    parts : tuple
        What follows in a block: "scale" and "offset", the units as float16; "less", the offset's less than nothing;
        planes of "codes" and of "numbers", the scales from the least on and then the offsets.
    """

    bits: int
    group_size: int
    size: int
    scales: tuple[int, int]
    offsets: int
    parts: tuple[Any, ...]
    table: bool = False

    @property
    def groups(self) -> int:
        """Groups of a block."""
        return self.size // self.group_size

    @property
    def n_bytes(self) -> int:
        """Bytes of a block."""
        return sum(self.size_of(*p) if isinstance(p, tuple) else 2 for p in self.parts)

    def size_of(self, what: str, plane: Any) -> int:
        """Bytes of a plane."""
        count = self.size if what == "codes" else self.groups * (1 + (self.offsets > 0))
        return int(plane.size(count))


def _codes(*planes: Plane) -> tuple[tuple[str, Plane], ...]:
    return tuple(("codes", plane) for plane in planes)


_LOW, _LOW_K, _LOW_2 = Plane(0, 4, 32), Plane(0, 4, 64), Plane(0, 2, 128)
_ONE, _SIX, _SIGNED = (1, 1), (0, 63), (-32, 31)
KINDS = {
    "q4_1": Kind(4, 32, 32, _ONE, 1, ("scale", "offset", *_codes(_LOW))),
    "q5_0": Kind(5, 32, 32, _ONE, 0, ("scale", *_codes(Plane(4, 1, 8), _LOW))),
    "q5_1": Kind(5, 32, 32, _ONE, 1, ("scale", "offset", *_codes(Plane(4, 1, 8), _LOW))),
    "q2_k": Kind(2, 16, 256, (0, 15), 15, (("numbers", _LOW), *_codes(_LOW_2), "scale", "less")),
    "q3_k": Kind(
        3, 16, 256, _SIGNED, 0,
        (*_codes(Plane(2, 1, 256), _LOW_2), ("numbers", Plane(0, 4, 16)), ("numbers", Plane(4, 2, 16)), "scale"),
    ),
    "q4_k": Kind(4, 32, 256, _SIX, 63, ("scale", "less", ("numbers", Sixes()), *_codes(_LOW_K))),
    "q5_k": Kind(5, 32, 256, _SIX, 63, ("scale", "less", ("numbers", Sixes()), *_codes(Plane(4, 1, 256), _LOW_K))),
    "q6_k": Kind(
        6, 16, 256, (-128, 127), 0, (*_codes(Plane(0, 4, 128), Plane(4, 2, 128)), ("numbers", Plane(0, 8, 1)), "scale")
    ),
    "iq4_xs": Kind(
        4, 32, 256, _SIGNED, 0,
        ("scale", ("numbers", Plane(4, 2, 4)), ("numbers", Plane(0, 4, 2)), *_codes(_LOW)), table=True,
    ),
}  # fmt: skip
_Name = Annotated[str, Allowed(", ".join(KINDS), KINDS.__contains__)]


@GRIDS.register("gguf")
@dataclass(frozen=True)
class Blocks(Grid):
    """Codes times the scale of their group, and an offset added: each a whole number of a unit of the block.

    Parameters
    ----------
    kind : str
        Name of the type in lower case.
    """

    kind: str

    name: ClassVar[str] = "gguf"
    portable: ClassVar[bool] = False
    scale_dtypes: ClassVar[tuple[str, ...]] = ("float16",)
    zeros_dtype: ClassVar[type[np.generic]] = np.float32

    def __post_init__(self) -> None:
        known = self.facts
        if (self.bits, self.group_size, self.scale_dtype) != (known.bits, known.group_size, "float16"):
            raise ConfigError(
                f"{self.label} has {known.bits} bits, groups of {known.group_size} and scales in float16; got "
                f"{self.bits} bits, groups of {self.group_size} and {self.scale_dtype}"
            )

    @classmethod
    def holds(cls, symmetric: bool, more: Mapping[str, Any]) -> bool:
        """Codes of a type of GGUF."""
        return set(more) == {"gguf"} and (more["gguf"] not in KINDS or symmetric == (KINDS[more["gguf"]].offsets == 0))

    @classmethod
    def given(cls, more: Mapping[str, Any]) -> dict[str, Any]:
        """The type."""
        return {"kind": checked(_Name, more["gguf"], "gguf", ConfigError)}

    def more(self) -> dict[str, Any]:
        """The type."""
        return {"gguf": self.kind}

    @property
    def facts(self) -> Kind:
        """What the type is."""
        return KINDS[self.kind]

    @property
    def symmetric(self) -> bool:  # type: ignore[override]  # of a type, not of the class
        """Whether values have no offset."""
        return self.facts.offsets == 0

    @property
    def label(self) -> str:
        """Name in reports."""
        return self.kind.upper()

    @property
    def gguf(self) -> str:
        """Name of the type."""
        return self.label

    @property
    def gguf_width(self) -> int:
        """Weights of a group."""
        return self.group_size

    @property
    def panels(self) -> bool:
        """Whether scales alone say what codes stand for, in bits that the processor's layout has."""
        return self.symmetric and self.bits <= 4

    @property
    def levels(self) -> NDArray[np.float32] | None:
        """Those of IQ4_NL, where they are not even."""
        return Table(4, 32, "float16", UNEVEN[4]).levels if self.facts.table else None

    def check_columns(self, columns: int) -> None:
        """Rows are whole blocks."""
        if columns % self.facts.size:
            raise ConfigError(
                f"{self.label} has blocks of {self.facts.size} weights, and {columns} columns are no whole number of them; "
                "take another type for these layers, such as --layer 'PATTERN:levels=q5_0', or --exclude them"
            )

    def core(
        self,
        *,
        scale_search: ScaleSearch = "max",
        signed: bool = False,
        scale_bits: int | None = None,
        scale_dtype: str | None = None,
    ) -> native.Grid:
        """As of `Grid`; with a type for the scales, that of products, for which scales are of their own."""
        if scale_bits is not None:
            raise ConfigError(f"{self.label} has scales of its own: leave --scale-bits away")
        if scale_dtype is not None:
            return native.Grid(
                bits=self.bits, group_size=self.group_size, scale_dtype=scale_dtype, signed=True, **self._table()
            )
        return super().core()

    def _native(self) -> dict[str, Any]:
        known = self.facts
        parts = PARTS if known.table else 1
        return {"units": (known.groups, known.scales, known.offsets, parts), **self._table()}

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

    def gguf_data(self, codes: NDArray[Any], scales: NDArray[np.float32], zeros: NDArray[Any] | None) -> Bytes:
        """Return the blocks (out, bytes)."""
        known, (rows, columns) = self.facts, codes.shape
        self.check_columns(columns)
        flat = (codes + np.array(self.offset, codes.dtype)).astype(np.uint8).reshape(-1, known.size)
        unit, numbers = _counted(scales.reshape(-1, known.groups), known.scales, PARTS if known.table else 1)
        halves = {"scale": unit / np.float32(PARTS) if known.table else unit}
        numbers -= known.scales[0] if known.bits < 6 else 0
        if known.offsets:
            assert zeros is not None
            halves["offset"], more = _counted(zeros.reshape(-1, known.groups), (int(known.groups == 1), known.offsets))
            halves["less"], numbers = -halves["offset"], np.hstack([numbers, more])
        planes = {"codes": flat, "numbers": numbers.astype(np.int8).view(np.uint8)}
        found = [planes[p[0]] if isinstance(p, tuple) else halves[p].astype("<f2")[:, None].view(np.uint8) for p in known.parts]
        packed = [p[1].pack(x) if isinstance(p, tuple) else x for p, x in zip(known.parts, found, strict=True)]
        return np.hstack(packed).reshape(rows, -1)

    def from_gguf(self, data: Bytes) -> Arrays:
        """Codes, scales and offsets of blocks (out, bytes)."""
        known, rows = self.facts, len(data)
        flat, at = data.reshape(-1, known.n_bytes), 0
        planes: dict[str, Any] = {"codes": np.uint8(0), "numbers": np.uint8(0)}
        halves: dict[str, NDArray[np.float32]] = {}
        for part in known.parts:
            size = known.size_of(*part) if isinstance(part, tuple) else 2
            piece, at = np.ascontiguousarray(flat[:, at : at + size]), at + size
            if isinstance(part, tuple):
                planes[part[0]] = planes[part[0]] | part[1].unpack(piece)
            else:
                halves[part] = piece.view("<f2").astype(np.float32)
        codes = (planes["codes"].astype(np.int16) - self.offset).astype(self.dtype).reshape(rows, -1)
        numbers = np.asarray(planes["numbers"])
        whole = numbers.view(np.int8) if known.bits == 6 else numbers.astype(np.int8) + np.int8(known.scales[0])
        counts = whole[:, : known.groups] if known.groups > 1 else np.float32(1)
        scales = halves["scale"] * np.float32(PARTS if known.table else 1) * counts
        zeros = None
        if known.offsets:
            others = numbers[:, known.groups :] if known.groups > 1 else np.float32(1)
            unit = halves["offset"] if "offset" in halves else -halves["less"]
            zeros = (unit * others).astype(np.float32).reshape(rows, -1)
        return codes, scales.astype(np.float32).reshape(rows, -1), zeros

    def tensors(
        self, codes: NDArray[Any], scales: NDArray[np.float32], zeros: NDArray[Any] | None
    ) -> dict[str, RawTensor]:
        """Return the blocks of GGUF, and the shape."""
        return {
            "weight_packed": RawTensor.of(self.gguf_data(codes, scales, zeros)),
            "weight_shape": RawTensor.of(np.array(codes.shape, dtype=np.int64)),
        }

    def read(self, reader: TensorReader, module: str, rows: int, columns: int) -> Arrays:
        """Read what `tensors` gave."""
        name = f"{module}.weight_packed"
        if columns % self.facts.size:
            raise CheckpointError(f"{reader.where}: tensor {name!r}: {columns} columns in {self.label}")
        with np.errstate(invalid="ignore"):  # said below
            found = self.from_gguf(reader.get(name, ("U8",), (rows, self.n_bytes(1, columns))).array())
        if not all(np.isfinite(numbers).all() for numbers in found[1:] if numbers is not None):
            raise CheckpointError(f"{reader.where}: tensor {name!r} holds a scale or an offset that is not finite")
        return found


def _counted(
    values: NDArray[np.float32], limits: tuple[int, int], parts: int = 1
) -> tuple[NDArray[np.float32], NDArray[np.int16]]:
    """Units (n,), of which float16 holds a part, and the whole numbers of them (n, groups) that values are.

    Raises
    ------
    CheckpointError
        Values are none.
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
        raise CheckpointError(f"scales or offsets of a block are no whole numbers of a float16: {values[left[0]]}")
    numbers = np.rint(values / np.where(unit == 0, 1, unit)[:, None]).astype(np.int16)
    return unit, numbers


def _blocks(kind: str, bits: int, group_size: int, scale_dtype: str) -> Grid:
    """Return the grid of a type, whose bits and groups are its own."""
    return Blocks(KINDS[kind].bits, KINDS[kind].group_size, scale_dtype, kind)


def _simple(make: Callable[[], Grid], bits: int, group_size: int, scale_dtype: str) -> Grid:
    return make()


for _kind in KINDS:
    LEVELS.register(_kind)(partial(_blocks, _kind))
for _kind, _bits, _size in (("q2_0", 2, 64), ("q4_0", 4, 32), ("q8_0", 8, 32)):
    LEVELS.register(_kind)(partial(_simple, partial(Integer, _bits, _size, "float16")))
LEVELS.register("iq4_nl")(partial(_simple, partial(Table, 4, 32, "float16", UNEVEN[4])))
