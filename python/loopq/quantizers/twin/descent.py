"""Coordinate descent on codes and on scales (coordinate/descent.rs), all rows at once.

A sweep of the core changes a code only if that lowers the loss. The twin therefore evaluates all columns of a row at
once. It takes the first gain after the last change. The changes and their order are those of the core.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from loopq.cuda.descent import MOST_COLUMNS, Descent
from loopq.cuda.load import Backend, cuda_backend
from loopq.errors import KernelError, MissingExtraError
from loopq.quantizers.twin.grid import Codes

#: Changes between two checks for finished rows. A check waits for the device.
BETWEEN = 8


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
        state = (self.steps, self.values, self.gradient, self.loss, self.scale)
        levels = None if codes.table is None else (codes.table, codes.between)
        rest = (self.zero.contiguous(), self.active, s, levels, codes.width, codes.top)
        return Descent(backend, *state, *rest)


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


@dataclass
class _Moving:
    """Rows (n, d) with changing codes, of all inputs in sequence."""

    #: Index among all rows, and index of its S's first row among the rows of all S.
    row: Tensor
    first: Tensor
    steps: Tensor
    values: Tensor
    gradient: Tensor
    energy: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor
    zero: Tensor
    loss: Tensor
    #: Columns passed in this sweep, completed sweeps, changes.
    passed: Tensor
    sweeps: Tensor
    moves: Tensor

    def some(self, chosen: Tensor) -> _Moving:
        """Return the chosen rows."""
        return _Moving(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})


def change_codes(rows: Rows, s: Tensor, codes: Codes, sweeps: int) -> Tensor:
    """Change one code at a time, for at most `sweeps` sweeps. S is (L, d, d). Returns the moves, (L, rows)."""
    kernel = rows.on_kernels(s, codes)
    if kernel is not None:
        return kernel.codes(sweeps)
    n, height, d = rows.steps.shape
    flat = n * height
    owner = torch.arange(n, device=s.device).repeat_interleave(height)
    zero = rows.spread(codes, rows.zero).reshape(flat, d)
    moving = _Moving(
        row=torch.arange(flat, device=s.device),
        first=owner * d,
        steps=rows.steps.view(flat, d),
        values=rows.values.view(flat, d),
        gradient=rows.gradient.view(flat, d),
        energy=s.diagonal(dim1=1, dim2=2)[owner],
        scale=rows.spread(codes, rows.scale).reshape(flat, d),
        low=-zero,
        high=codes.top - zero,
        zero=zero,
        loss=rows.loss.view(flat),
        passed=torch.zeros(flat, dtype=torch.int64, device=s.device),
        sweeps=torch.zeros(flat, dtype=torch.int64, device=s.device),
        moves=torch.zeros(flat, dtype=torch.int64, device=s.device),
    )
    moves = torch.zeros(flat, dtype=torch.int64, device=s.device)
    chosen = rows.active.view(flat).nonzero()[:, 0] if sweeps else moves[:0]
    columns, lines = torch.arange(d, device=s.device), s.view(n * d, d)
    while len(chosen):
        moving = moving.some(chosen)
        for _ in range(BETWEEN):
            moved = _change(moving, lines, codes, columns, sweeps)
        for to, name in ((rows.steps, "steps"), (rows.values, "values"), (rows.gradient, "gradient")):
            to.view(flat, d)[moving.row] = getattr(moving, name)
        rows.loss.view(flat)[moving.row] = moving.loss
        moves[moving.row] = moving.moves
        chosen = moved.nonzero()[:, 0]
    return moves.view(n, height)


def _change(at: _Moving, lines: Tensor, codes: Codes, columns: Tensor, sweeps: int) -> Tensor:
    """Make the next change of each row and return whether there was one."""
    d = len(columns)
    wanted = (at.values - at.gradient / at.energy) / at.scale
    if codes.table is None:
        step = wanted.round_().clamp_(at.low, at.high).float()
    else:
        step = codes.step(codes.code(wanted, at.zero).float(), at.zero)
    change = (step * at.scale).double() - at.values
    gain = change * (2.0 * at.gradient + change * at.energy)
    # Columns after the last change, then the rest in a circle.
    ahead = torch.remainder(columns - at.passed[:, None], d)
    ahead = torch.where(gain < 0, ahead, d).amin(1)
    column = at.passed + ahead
    at.sweeps += column >= d
    moved = (ahead < d) & (at.sweeps < sweeps)
    column = (column % d)[:, None]
    by = torch.where(moved, change.gather(1, column)[:, 0], 0.0)
    at.loss += torch.where(moved, gain.gather(1, column)[:, 0], 0.0)
    at.values.scatter_add_(1, column, by[:, None])
    old = at.steps.gather(1, column)
    at.steps.scatter_(1, column, torch.where(moved[:, None], step.gather(1, column), old))
    at.gradient.addcmul_(by[:, None], lines[at.first + column[:, 0]])
    at.passed = column[:, 0] + 1
    at.moves += moved
    return moved


def change_scales(rows: Rows, s: Tensor, codes: Codes) -> None:
    """Change one scale at a time, once round. A group keeps its scale if it has no step or cannot store the best."""
    d, kernel = s.shape[1], rows.on_kernels(s, codes)
    if kernel is not None and codes.scale_bits is None and codes.width <= MOST_COLUMNS:
        kernel.scales(codes.grid.scale_dtype, signed=codes.signed)
        return
    for g, first in enumerate(range(0, d, codes.width)):
        own = slice(first, min(d, first + codes.width))
        square, gradient = s[:, own, own], rows.gradient[..., own]
        steps, old = rows.steps[..., own].double(), rows.scale[..., g]
        slope, curve = (steps * gradient).sum(-1), (steps * (steps @ square)).sum(-1)
        best = codes.rounded(old.double() - slope / curve)
        fits = best.isfinite() & (best != 0) & rows.active
        if not codes.signed:
            fits &= best > 0
        best = torch.where(fits, best, old)
        new = (rows.steps[..., own] * best[..., None]).double()
        by = new - rows.values[..., own]
        gain = 2.0 * (by * gradient).sum(-1) + (by * (by @ square)).sum(-1)
        less = (gain < 0) & (best != old)
        rows.scale[..., g] = torch.where(less, best, old)
        rows.loss += torch.where(less, gain, 0.0)
        by = torch.where(less[..., None], by, 0.0)
        rows.values[..., own] += by
        rows.gradient += by @ s[:, own]
