"""Rows that lie on an accelerator: summed there in true float32, moved once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import loopq._native as native

if TYPE_CHECKING:
    from torch import Tensor


@contextlib.contextmanager
def true_float32() -> Iterator[None]:
    """Keep float32 products from being rounded to tf32 or bfloat16 first, and put the settings back."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class DeviceSums:
    """X^T X on the rows' own device: float32 products of each block of rows, added in float64.

    Parameters
    ----------
    dim : int
        Columns of a row.
    per_step : bool
        Keep each step apart.
    """

    def __init__(self, dim: int, *, per_step: bool) -> None:
        self._dim = dim
        self._per_step = per_step
        self._sums: dict[int, Tensor] = {}
        self._rows: dict[int, dict[int, int]] = {}

    def add(self, step: int, rows: Tensor) -> None:
        """Add rows of a step, Tensor (n_rows, dim) of any floating type, cut in the blocks of the core."""
        import torch

        key = step if self._per_step else -1
        if key not in self._sums:
            self._sums[key] = torch.zeros(self._dim, self._dim, dtype=torch.float64, device=rows.device)
            self._rows[key] = {}
        self._rows[key][step] = self._rows[key].get(step, 0) + rows.shape[0]
        with true_float32():
            for block in rows.float().split(native.BLOCK_ROWS):
                self._sums[key] += (block.T @ block).double()

    def move(self, acc: native.HessianAccumulator) -> None:
        """Move the sums to an accumulator and start anew."""
        for key, total in self._sums.items():
            acc.add_products(sorted(self._rows[key].items()), total.cpu().numpy())
        self._sums.clear()
        self._rows.clear()


def to_native(rows: Tensor) -> Any:
    """Copy rows to an array that the core reads; bfloat16 as its bits."""
    import torch

    host = rows.detach().to("cpu").contiguous()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view("uint16")
    if host.dtype not in (torch.float32, torch.float16):
        host = host.float()
    return host.numpy()
