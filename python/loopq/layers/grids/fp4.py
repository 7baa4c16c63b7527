"""4-bit floats, E2M1, with 8-bit scales: NVFP4 and MXFP4, as compressed-tensors stores them.

Layout: docs/formats/levels.md. A byte holds two weights, the first in the low half.
A half is a sign, two bits of exponent and one of mantissa.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopq.errors import CheckpointError, ConfigError
from loopq.layers.grid import Arrays, BlockType, Grid, halved
from loopq.layers.grids import GRIDS, LEVELS
from loopq.layers.grids.table import PARTS, Leveled
from loopq.layers.numbers import E4M3, MAGNITUDES, powers
from loopq.layers.reader import TensorReader
from loopq.storage.files import RawTensor
from loopq.storage.schema import between

_SIXTEENTHS = [int(PARTS * size) for size in MAGNITUDES]
#: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, in sixteenths.
E2M1 = (*[-size for size in _SIXTEENTHS[:0:-1]], *_SIXTEENTHS)
#: The half byte of each level: sign and place among the magnitudes.
_HALVES = np.array([8 | -k if k < 0 else k for k in range(-7, 8)], dtype=np.uint8)
#: The place of zero among the levels.
_ZERO = 7
#: Largest level and largest scale.
_LARGEST = 6.0 * 448.0
#: The power for weights with a maximum of 0.003 to 1.3. Layers that engines fuse must share one power.
_POWER = -11
_USUAL = range(_POWER - 8, _POWER + 1)


@dataclass(frozen=True)
class _FP4(Leveled):
    """E2M1 in groups of one size, with unsigned scales."""

    portable: ClassVar[bool] = False
    signed: ClassVar[bool | None] = False
    size: ClassVar[int]
    strategy: ClassVar[str] = "group"
    scale_kept: ClassVar[str] = "torch.uint8"

    def __post_init__(self) -> None:
        if self.bits != 4 or self.group_size != self.size:
            raise ConfigError(
                f"{self.name} has 4 bits and groups of {self.size}; got {self.bits} bits and groups of "
                f"{self.group_size}: give --bits 4 --group-size {self.size}"
            )
        super().__post_init__()

    def sixteenths(self) -> tuple[int, ...]:
        """The levels."""
        return E2M1

    @property
    def label(self) -> str:
        """Name in reports."""
        return self.name.upper()

    @property
    def compressed(self) -> tuple[str, dict[str, Any]]:
        """Format and scheme in compressed-tensors."""
        kept = {"scale_dtype": self.scale_kept, "zp_dtype": self.scale_kept}
        return f"{self.name}-pack-quantized", {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": self.strategy,
            "group_size": self.size,
            "dynamic": False,
            **kept,
        }

    @classmethod
    def from_compressed(cls, reader: TensorReader, module: str) -> dict[str, Any]:
        """Return the settings of a module, with rows and columns from the packed halves."""
        rows, half = reader.get(f"{module}.weight_packed", ("U8",), (None, None)).shape
        return {
            "name": f"{module}.weight",
            "kind": cls.name,
            "bits": 4,
            "group_size": cls.size,
            "symmetric": True,
            "scale_dtype": cls.scale_dtypes[0],
            "shape": [rows, 2 * half],
        }

    def n_bytes(self, rows: int, columns: int) -> int:
        """Bytes of `tensors` without the shape."""
        return rows * (-(-columns // 2) + self.n_groups(columns))

    def tensors(
        self, codes: NDArray[Any], scales: NDArray[np.float32], zeros: NDArray[np.uint8] | None
    ) -> dict[str, RawTensor]:
        """Return the stored tensors with the names of compressed-tensors."""
        halves = _HALVES[np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)), constant_values=_ZERO - 8) + 8]
        return {
            "weight_packed": RawTensor.of(halves[:, ::2] | halves[:, 1::2] << 4),
            "weight_scale": self.scales_to_raw(scales),
            "weight_shape": RawTensor.of(np.array(codes.shape, dtype=np.int64)),
        }

    def read(self, reader: TensorReader, module: str, rows: int, columns: int) -> Arrays:
        """Read the result of `tensors`."""
        packed = reader.get(f"{module}.weight_packed", ("U8",), (rows, -(-columns // 2))).array()
        halves = np.stack([packed & 15, packed >> 4], axis=2).reshape(rows, -1).astype(np.int8)
        codes = np.where(halves & 8, -(halves & 7), halves) + np.int8(_ZERO - 8)
        shape = (rows, self.n_groups(columns))
        return np.ascontiguousarray(codes[:, :columns]), self.scales_of(reader, module, shape), None

    @abstractmethod
    def scales_to_raw(self, scales: NDArray[np.float32]) -> RawTensor:
        """Return scales in their stored form."""

    @abstractmethod
    def scales_of(self, reader: TensorReader, module: str, shape: tuple[int, int]) -> NDArray[np.float32]:
        """Read the scales of a module."""


@GRIDS.register("nvfp4")
@dataclass(frozen=True)
class NVFP4(_FP4):
    """E2M1 in groups of 16. Scales are E4M3 times a power of two for the whole weight.

    Parameters
    ----------
    exponent : int
        The power.
    """

    exponent: Annotated[int, between(-100, 100)]

    scale_dtypes: ClassVar[tuple[str, ...]] = ("float8_e4m3fn",)
    size: ClassVar[int] = 16
    strategy: ClassVar[str] = "tensor_group"
    scale_kept: ClassVar[str] = "torch.float8_e4m3fn"

    def fitted(
        self, weight: NDArray[np.float32], energies: NDArray[np.float64] | None, threads: int
    ) -> NVFP4:
        """Return the grid with a power for the largest weight: the usual power, or the smallest sufficient one."""
        largest = float(np.abs(weight).max()) or 1.0
        exponent = math.ceil(math.log2(largest / _LARGEST))
        return (
            self if exponent in _USUAL else dataclasses.replace(self, exponent=min(max(exponent, -100), 100))
        )

    @classmethod
    def from_compressed(cls, reader: TensorReader, module: str) -> dict[str, Any]:
        """Return the settings of a module."""
        divisor = reader.get(f"{module}.weight_global_scale", ("F32",), (1,)).array()
        fraction, exponent = np.frexp(divisor[0])
        if fraction != 0.5:
            raise CheckpointError(
                f"{reader.where}: tensor '{module}.weight_global_scale': {divisor[0]} is no power of two, and loopq "
                "reads no other"
            )
        return {**super().from_compressed(reader, module), "exponent": 1 - int(exponent)}

    def n_bytes(self, rows: int, columns: int) -> int:
        """Bytes of `tensors` without the shape."""
        return super().n_bytes(rows, columns) + 4

    def tensors(
        self, codes: NDArray[Any], scales: NDArray[np.float32], zeros: NDArray[np.uint8] | None
    ) -> dict[str, RawTensor]:
        """Return the stored tensors, including the divisor of the scales."""
        divisor = np.array([2.0**-self.exponent], dtype=np.float32)
        return super().tensors(codes, scales, zeros) | {"weight_global_scale": RawTensor.of(divisor)}

    def scales_to_raw(self, scales: NDArray[np.float32]) -> RawTensor:
        """Return scales as E4M3 numbers."""
        values = scales * np.float32(2.0**-self.exponent)
        bits = np.searchsorted(E4M3, values).astype(np.uint8)
        if (E4M3[np.minimum(bits, len(E4M3) - 1)] != values).any():
            raise CheckpointError(f"a scale is no number of float8_e4m3fn times 2^{self.exponent}")
        return RawTensor.of(bits, "F8_E4M3")

    def scales_of(self, reader: TensorReader, module: str, shape: tuple[int, int]) -> NDArray[np.float32]:
        """Read scales as E4M3 numbers over the divisor, which must be the power in the description."""
        divisor = reader.get(f"{module}.weight_global_scale", ("F32",), (1,)).array()
        bits = reader.get(f"{module}.weight_scale", ("F8_E4M3",), shape).array()
        if divisor[0] != np.float32(2.0**-self.exponent) or (bits == 0).any() or (bits >= len(E4M3)).any():
            raise CheckpointError(
                f"{reader.where}: module {module!r}: its scales are not positive numbers times 2^{self.exponent}"
            )
        scales: NDArray[np.float32] = E4M3[bits] * np.float32(2.0**self.exponent)
        return scales

    def _native(self) -> dict[str, Any]:
        return super()._native() | {"scale_exponent": self.exponent}


@GRIDS.register("mxfp4")
@dataclass(frozen=True)
class MXFP4(_FP4):
    """E2M1 in groups of 32. Scales are powers of two."""

    scale_dtypes: ClassVar[tuple[str, ...]] = ("float8_e8m0fnu",)
    size: ClassVar[int] = 32

    @property
    def gguf(self) -> BlockType:
        """MXFP4."""
        return BlockType("MXFP4", 38, 44)

    def gguf_blocks(self, codes: NDArray[Any], scales: NDArray[np.float32]) -> list[NDArray[np.uint8]]:
        """Return exponents and halves as in `tensors`."""
        kept = self.scales_to_raw(scales).data.reshape(*scales.shape, 1)
        return [kept, halved(_HALVES[codes + 8])]

    def scales_to_raw(self, scales: NDArray[np.float32]) -> RawTensor:
        """Return exponents plus 127."""
        fraction, exponent = np.frexp(scales)
        if (fraction != 0.5).any() or (np.abs(exponent - 1) > 127).any():
            raise CheckpointError("a scale is no power of two from 2^-127 to 2^127")
        return RawTensor.of((exponent + 126).astype(np.uint8))

    def scales_of(self, reader: TensorReader, module: str, shape: tuple[int, int]) -> NDArray[np.float32]:
        """Read scales as powers of two."""
        bits = reader.get(f"{module}.weight_scale", ("U8",), shape).array()
        if (bits == 255).any():
            raise CheckpointError(
                f"{reader.where}: tensor '{module}.weight_scale' holds a scale that is no number"
            )
        return powers(bits)


def _asked(kind: type[_FP4], bits: int, group_size: int, scale_dtype: str, **more: Any) -> Grid:
    if scale_dtype != "float16":
        raise ConfigError(f"{kind.name} has scales of a type of its own: leave --set scale_dtype=... out")
    return kind(bits, group_size, kind.scale_dtypes[0], **more)


@LEVELS.register("nvfp4")
def nvfp4(bits: int, group_size: int, scale_dtype: str) -> Grid:
    """Return NVFP4 with a power that is not fitted yet."""
    return _asked(NVFP4, bits, group_size, scale_dtype, exponent=_POWER)


@LEVELS.register("mxfp4")
def mxfp4(bits: int, group_size: int, scale_dtype: str) -> Grid:
    """Return MXFP4."""
    return _asked(MXFP4, bits, group_size, scale_dtype)
