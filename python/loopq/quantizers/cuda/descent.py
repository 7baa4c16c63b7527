"""Coordinate descent of rows on codes and scales: launches of `descent.cu`.

The torch operations of `loopq.quantizers.twin.descent` are its reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loopq.quantizers.cuda.load import Backend, Kernel

#: Columns of a group whose scale is changed. Each row multiplies by a square of S of this size.
MOST_COLUMNS = 512

_KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}
_SIGNED = 4


@dataclass(frozen=True)
class Descent:
    """Rows on their way down. All tensors are contiguous, on the backend's device.

    Parameters
    ----------
    backend : Backend
    rows : tuple of Tensor
        Values of the codes in scales, float32, (L, rows, d). The same with their scales, and D S, float64. Losses,
        float64, (L, rows). Scales and zero points, float32, (L, rows, groups). Rows to change, int32, (L, rows).
        All but the last two change.
    matrix : tuple of Tensor
        S, float64, (L, d, d), and its diagonals.
    levels : tuple of Tensor, or None
        Values of the codes, float32, and the midpoints between them, float64. Without them a code's value is code minus
        zero point.
    width, top : int
        Columns of a group, and the largest code.
    """

    backend: Backend
    rows: tuple[Tensor, ...]
    matrix: tuple[Tensor, Tensor]
    levels: tuple[Tensor, Tensor] | None
    width: int
    top: int

    def codes(self, sweeps: int) -> Tensor:
        """Change one code at a time, for at most `sweeps` sweeps. Return the changes, int64, shape (L, rows)."""
        threads = min(512, -(-self.rows[0].shape[2] // 32) * 32)
        moves = torch.empty_like(self.rows[3], dtype=torch.int64)
        self._launch(1, threads, 16 + threads // 32 * 8, moves, sweeps, 0)
        return moves

    def scales(self, scale_dtype: str, *, signed: bool) -> None:
        """Change one scale at a time, once round. The types are float32, float16 and bfloat16."""
        n, height, d = self.rows[0].shape
        kind = _KINDS[scale_dtype] + _SIGNED * signed
        by = self.rows[1].new_empty(n, height, self.width)
        for group, first in enumerate(range(0, d, self.width)):
            self._launch(0, 128, 8 * (128 + self.width), by, group, kind)
            columns = slice(first, min(d, first + self.width))
            self.rows[2].baddbmm_(by[..., : columns.stop - first], self.matrix[0][:, columns])

    def _launch(self, of_codes: int, threads: int, shared: int, out: Tensor, number: int, kind: int) -> None:
        n, height, d = self.rows[0].shape
        tables = (0, 0) if self.levels is None else tuple(x.data_ptr() for x in self.levels)
        self.backend.launch(
            Kernel("descent.cu", "loopq_descent", (f"-DLQ_CODES={of_codes}",)),
            (n * height, 1),
            threads,
            shared,
            (
                *(x.data_ptr() for x in (*self.rows, *self.matrix)),
                *tables,
                out.data_ptr(),
                *(np.int32(x) for x in (height, d, self.width, self.top, number, kind)),
            ),
        )
