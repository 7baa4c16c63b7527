"""Coordinate descent of rows on codes and scales: launches of `descent.cu`.

The torch operations of `loopq.quantizers.twin.descent` are its reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loopq.cuda.load import Backend, Kernel

__all__ = ["MOST_COLUMNS", "Descent"]

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
    steps : Tensor, float32, shape (L, rows, d)
        Values of the codes in scales. This and the next four change.
    values, gradient : Tensor, float64, shape (L, rows, d)
        The same with their scales, and D S.
    loss : Tensor, float64, shape (L, rows)
    scale, zero : Tensor, float32, shape (L, rows, groups)
    active : Tensor, bool, shape (L, rows)
        Other rows stay.
    matrix : Tensor, float64, shape (L, d, d)
        S.
    levels : tuple of Tensor, or None
        Values of the codes, float32, and the midpoints between them, float64. Without them a code's value is code minus
        zero point.
    width, top : int
        Columns of a group, and the largest code.
    """

    backend: Backend
    steps: Tensor
    values: Tensor
    gradient: Tensor
    loss: Tensor
    scale: Tensor
    zero: Tensor
    active: Tensor
    matrix: Tensor
    levels: tuple[Tensor, Tensor] | None
    width: int
    top: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "_energy", self.matrix.diagonal(dim1=1, dim2=2).contiguous())
        object.__setattr__(self, "_live", self.active.int())

    def codes(self, sweeps: int) -> Tensor:
        """Change one code at a time, for at most `sweeps` sweeps. Return the changes, int64, shape (L, rows)."""
        threads = min(512, -(-self.steps.shape[2] // 32) * 32)
        moves = torch.empty(self.loss.shape, dtype=torch.int64, device=self.loss.device)
        self._launch(1, threads, 16 + threads // 32 * 8, moves, sweeps, 0)
        return moves

    def scales(self, scale_dtype: str, *, signed: bool) -> None:
        """Change one scale at a time, once round. The types are float32, float16 and bfloat16."""
        d, kind = self.steps.shape[2], _KINDS[scale_dtype] + _SIGNED * signed
        by = self.values.new_empty(*self.loss.shape, self.width)
        for group, first in enumerate(range(0, d, self.width)):
            self._launch(0, 128, 8 * (128 + self.width), by, group, kind)
            own = slice(first, min(d, first + self.width))
            self.gradient.baddbmm_(by[..., : own.stop - first], self.matrix[:, own])

    def _launch(self, of_codes: int, threads: int, shared: int, out: Tensor, number: int, kind: int) -> None:
        rows, d = self.steps.shape[1:]
        state = (self.steps, self.values, self.gradient, self.loss, self.scale, self.zero, self._live)
        tables = (0, 0) if self.levels is None else tuple(x.data_ptr() for x in self.levels)
        self.backend.launch(
            Kernel("descent.cu", "loopq_descent", (f"-DLQ_CODES={of_codes}",)),
            (self.loss.numel(), 1),
            threads,
            shared,
            (
                *(x.data_ptr() for x in (*state, self.matrix, self._energy)),
                *tables,
                out.data_ptr(),
                *(np.int32(x) for x in (rows, d, self.width, self.top, number, kind)),
            ),
        )
