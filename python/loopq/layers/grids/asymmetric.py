"""Unsigned integers minus their group's zero point, times its scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.errors import ConfigError
from loopq.layers.grid import Arrays, Grid
from loopq.layers.grids import GRIDS
from loopq.layers.reader import TensorReader
from loopq.storage.files import RawTensor


@GRIDS.register("asymmetric")
@dataclass(frozen=True)
class Asymmetric(Grid):
    """Codes and zero points in [0, 2^b - 1]: (code - zero) * scale."""

    symmetric: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """Name in reports."""
        return f"INT{self.bits}, asymmetric"

    def n_bytes(self, rows: int, columns: int) -> int:
        """Bytes of `tensors` without the shape."""
        return super().n_bytes(rows, columns) + 4 * self.n_groups(columns) * -(-rows * self.bits // 32)

    def tensors(
        self, codes: NDArray[Any], scales: NDArray[np.float32], zeros: NDArray[np.uint8] | None
    ) -> dict[str, RawTensor]:
        """Return the stored tensors. Zero points are packed along the output dimension, so that a group is a column."""
        self._check_zeros(zeros, scales.shape)
        assert zeros is not None
        packed = native.pack_dense(np.ascontiguousarray(zeros.T), self.bits, 0)
        return super().tensors(codes, scales, None) | {
            "weight_zero_point": RawTensor.of(np.ascontiguousarray(packed.T))
        }

    def read(self, reader: TensorReader, module: str, rows: int, columns: int) -> Arrays:
        """Read the result of `tensors`."""
        codes, scales, _ = super().read(reader, module, rows, columns)
        name, n_groups = f"{module}.weight_zero_point", self.n_groups(columns)
        stored = reader.codes(name, self.bits, rows, n_groups, down=True)
        return codes, scales, np.ascontiguousarray(stored.T)

    def _check_zeros(self, zeros: NDArray[Any] | None, expected: tuple[int, ...]) -> None:
        if zeros is None or zeros.shape != expected or zeros.dtype != np.uint8:
            got = "missing" if zeros is None else f"{zeros.dtype} of shape {zeros.shape}"
            raise ConfigError(f"zero points are {got}; expected uint8 {expected}")
