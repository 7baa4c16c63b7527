"""Coordinate descent on codes and on scales (coordinate/descent.rs), all rows at once.

A sweep of the core changes a code only if that lowers the loss. The twin therefore evaluates all columns of a row at
once. It takes the first gain after the last change. The changes and their order are those of the core.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from loopq.errors import KernelError, MissingExtraError
from loopq.quantizers.cuda.descent import MOST_COLUMNS, Descent
from loopq.quantizers.cuda.load import Backend, cuda_backend
from loopq.quantizers.twin.grid import Codes


@dataclass
class Rows:
    """State of the rows. Every tensor begins with (L, rows).

    Parameters
    ----------
    steps : Tensor, float32, (L, rows, d)
        Values of the codes in units of the scale.
    values : Tensor, float64, (L, rows, d)
        Values of the codes. They include the scale.
    gradient : Tensor, float64, (L, rows, d)
        D S.
    scale, zero : Tensor, float32, (L, rows, groups)
        Scales and zero points. Zero points belong to biased codes.
    loss : Tensor, float64, (L, rows)
        The loss of each row. Every change updates it.
    active : Tensor, bool, (L, rows)
        Rows that are not done.
    """

    steps: Tensor
    values: Tensor
    gradient: Tensor
    scale: Tensor
    zero: Tensor
    loss: Tensor
    active: Tensor

    def spread(self, codes: Codes, levels: Tensor) -> Tensor:
        """Return the scale or zero point of every column."""
        return spread(codes, levels, self.steps.shape[-1])

    def on_kernels(self, s: Tensor, codes: Codes) -> Descent | None:
        """Return the rows for kernels, where there are any."""
        backend = kernels(s.device)
        if backend is None:
            return None
        energy, live = s.diagonal(dim1=1, dim2=2).contiguous(), self.active.int()
        levels = None if codes.table is None else (codes.table, codes.between)
        return Descent(
            backend,
            (self.steps, self.values, self.gradient, self.loss, self.scale, self.zero.contiguous(), live),
            (s, energy),
            levels,
            codes.width,
            codes.top,
        )


def kernels(device: torch.device) -> Backend | None:
    """Return what runs the kernels, or None. Without CuPy a GPU takes torch's operations, with a warning."""
    if device.type != "cuda":
        return None
    try:
        return cuda_backend(device.index or 0)
    except (MissingExtraError, KernelError) as reason:
        warnings.warn(f"the solver takes several times as long without its kernels: {reason}", stacklevel=2)
        return None


def spread(codes: Codes, levels: Tensor, columns: int) -> Tensor:
    """Repeat numbers of groups (..., groups) for each of their columns."""
    return levels.repeat_interleave(codes.width, -1)[..., :columns]


def change_codes(rows: Rows, s: Tensor, codes: Codes, sweeps: int) -> Tensor:
    """Change one code at a time, for at most `sweeps` sweeps. S is (L, d, d). Returns the moves, (L, rows)."""
    kernel = rows.on_kernels(s, codes)
    if kernel is not None:
        return kernel.codes(sweeps)
    d, energy = s.shape[1], s.diagonal(dim1=1, dim2=2)[:, None]
    scale, zero = rows.spread(codes, rows.scale), rows.spread(codes, rows.zero)
    columns, owner = torch.arange(d, device=s.device), torch.arange(len(s), device=s.device)[:, None]
    moves = torch.zeros_like(rows.loss, dtype=torch.int64)
    passed, begun, moved = torch.zeros_like(moves), torch.zeros_like(moves), rows.active
    while bool(moved.any()):
        wanted = (rows.values - rows.gradient / energy) / scale
        if codes.table is None:
            step = wanted.round_().clamp_(-zero, codes.top - zero).float()
        else:
            step = codes.step(codes.code(wanted, zero).float(), zero)
        change = (step * scale).double() - rows.values
        gain = change * (2.0 * rows.gradient + change * energy)
        # Columns after the last change, then the rest in a circle.
        ahead = torch.remainder(columns - passed[..., None], d)
        ahead = torch.where(gain < 0, ahead, d).amin(-1)
        begun += passed + ahead >= d
        moved = moved & (ahead < d) & (begun < sweeps)
        column = ((passed + ahead) % d)[..., None]
        by = torch.where(moved, change.gather(-1, column)[..., 0], 0.0)
        rows.loss += torch.where(moved, gain.gather(-1, column)[..., 0], 0.0)
        rows.values.scatter_add_(-1, column, by[..., None])
        old = rows.steps.gather(-1, column)
        rows.steps.scatter_(-1, column, torch.where(moved[..., None], step.gather(-1, column), old))
        rows.gradient.addcmul_(by[..., None], s[owner, column[..., 0]])
        passed = column[..., 0] + 1
        moves += moved
    return moves


def change_scales(rows: Rows, s: Tensor, codes: Codes) -> None:
    """Change one scale at a time, once round. A group keeps its scale if it has no step or cannot store the best."""
    d, kernel = s.shape[1], rows.on_kernels(s, codes)
    if kernel is not None and codes.scale_bits is None and codes.width <= MOST_COLUMNS:
        kernel.scales(codes.grid.scale_dtype, signed=codes.signed)
        return
    for g, first in enumerate(range(0, d, codes.width)):
        columns = slice(first, min(d, first + codes.width))
        square, gradient = s[:, columns, columns], rows.gradient[..., columns]
        steps, old = rows.steps[..., columns].double(), rows.scale[..., g]
        slope, curve = (steps * gradient).sum(-1), (steps * (steps @ square)).sum(-1)
        best = codes.rounded(old.double() - slope / curve)
        fits = best.isfinite() & (best != 0) & rows.active
        if not codes.signed:
            fits &= best > 0
        best = torch.where(fits, best, old)
        new = (rows.steps[..., columns] * best[..., None]).double()
        by = new - rows.values[..., columns]
        gain = 2.0 * (by * gradient).sum(-1) + (by * (by @ square)).sum(-1)
        less = (gain < 0) & (best != old)
        rows.scale[..., g] = torch.where(less, best, old)
        rows.loss += torch.where(less, gain, 0.0)
        by = torch.where(less[..., None], by, 0.0)
        rows.values[..., columns] += by
        rows.gradient += by @ s[:, columns]
