"""GPTQ's sweep with several open paths of codes in each row (gptq/beam.rs). Each column keeps the cheapest paths.

Paths are in single precision, in units of a power of two per row. The errors of decided codes reach later columns in
double precision. The caller takes only codes from here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from loopq._native import BEAM_COLUMNS as BLOCK
from loopq._native import BEAM_STRIP as STRIP
from loopq.quantizers.cuda.beam import POWERS, advance
from loopq.quantizers.twin.descent import kernels, spread
from loopq.quantizers.twin.factor import Factors
from loopq.quantizers.twin.grid import Codes

#: Paths that are open at once, over all rows. A path takes some KiB.
PATHS = 1 << 20


def search(
    target: Tensor, factors: Factors, codes: Codes, known: tuple[Tensor, Tensor], n_paths: int
) -> Tensor:
    """Codes (L, rows, places), uint8, of targets (L, rows, places), float32.

    `known` holds scales and zero points (L, rows, groups).
    """
    height = max(1, PATHS // (n_paths * len(target)))
    parts = []
    for first in range(0, target.shape[1], height):
        rows = slice(first, first + height)
        scale, zero = (levels[:, rows] for levels in known)
        parts.append(_Search(target[:, rows], factors, codes, scale, zero).run(n_paths))
    return torch.cat(parts, 1)


class _Search:
    """Some rows on their way through the blocks. Columns are padded to whole blocks."""

    def __init__(self, target: Tensor, factors: Factors, codes: Codes, scale: Tensor, zero: Tensor) -> None:
        d = target.shape[2]
        self._codes, self._d, self._padding = codes, d, -d % BLOCK
        self._target = self._padded(target, 0.0)
        self._unit = unit = _power_of_two(scale.abs().double().mean(2).float())[..., None]
        by_place = [factors.in_order(spread(codes, x, d)) for x in (scale, zero)]
        self._scale, self._zero = self._padded(by_place[0], 1.0), self._padded(by_place[1], 0.0)
        pivot_unit = _power_of_two(factors.pivots.mean(1).float())[:, None]
        # A padding column costs nothing, and its error reaches no other column.
        self._pivots = self._padded((factors.pivots / pivot_unit).float(), 0.0)
        #: With an empty block in front, as the block before the first.
        front = (BLOCK, 0)
        self._shown = [pad(x, front) for x in (self._target / unit, self._scale / unit, self._zero)]
        self._upper = pad(torch.triu(factors.upper.double(), 1), (0, self._padding, BLOCK, self._padding))
        self._errors = torch.zeros_like(self._target, dtype=torch.float64)
        self._out = torch.zeros_like(self._target, dtype=torch.uint8)

    def run(self, n_paths: int) -> Tensor:
        """Codes (L, rows, places)."""
        paths = _Paths(self._codes, self._target, n_paths)
        for first in range(0, self._d, BLOCK):
            before, block = slice(first - BLOCK, first), slice(first, first + BLOCK)
            # This decides the codes of the block before the last.
            self._take(slice(before.start - BLOCK, before.start), paths.decide())
            known = max(0, before.start)
            moved = self._errors[..., :known] @ self._upper[:, BLOCK : BLOCK + known, block]
            moved = (moved + self._target[..., block]) / self._unit
            both = slice(first, first + 2 * BLOCK)
            shown = (x[..., both] for x in self._shown)
            paths.begin(moved, self._pivots[:, block], *shown, self._upper[:, both, block])
            paths.advance()
        last = (self._d - 1) // BLOCK * BLOCK
        self._take(slice(last - BLOCK, last), paths.decide())
        self._out[..., last:] = paths.decide()
        return self._out[..., : self._d]

    def _take(self, block: slice, decided: Tensor) -> None:
        """Store the codes of a block and their errors."""
        if block.start < 0:
            return
        self._out[..., block] = decided
        value = self._codes.step(decided.float(), self._zero[..., block]) * self._scale[..., block]
        self._errors[..., block] = self._target[..., block].double() - value

    def _padded(self, values: Tensor, by: float) -> Tensor:
        return pad(values, (0, self._padding), value=by)


class _Paths:
    """Paths of rows (L, rows, places) through one block of columns after the other."""

    #: This block's weights, moved by the errors of all columns except those of the previous block, and its pivots.
    _moved: Tensor
    _pivots: Tensor
    #: For the previous block and this one, in units of the row.
    _original: Tensor
    _scale: Tensor
    _zero: Tensor
    #: A, both blocks by this one.
    _upper: Tensor

    def __init__(self, codes: Codes, target: Tensor, n_paths: int) -> None:
        paths = *target.shape[:2], n_paths
        self._codes, self._n_paths = codes, n_paths
        self._taken = torch.zeros(*paths, 2 * BLOCK, dtype=torch.uint8, device=target.device)
        #: Cost above the best path, which is the first; infinite for an unused place.
        self._cost = torch.full(paths, math.inf, device=target.device)
        self._cost[..., 0] = 0.0
        self._kernels = kernels(target.device) if n_paths in POWERS else None
        self._levels = None if codes.table is None else (codes.table, codes.between.float())

    def begin(self, *block: Tensor) -> None:
        """Load the next block of columns: moved weights and pivots, then what includes the block before."""
        single = [x.float().contiguous() for x in block]
        self._moved, self._pivots, self._original, self._scale, self._zero, self._upper = single

    def decide(self) -> Tensor:
        """Decide the previous block by the best path. Paths with other codes end. This block becomes the previous."""
        decided = self._taken[:, :, 0, :BLOCK].clone()
        others = (self._taken[..., :BLOCK] != decided[:, :, None]).any(-1)
        self._cost.masked_fill_(others, math.inf)
        self._taken[..., :BLOCK] = self._taken[..., BLOCK:]
        return decided

    def advance(self) -> None:
        """Extend the paths through the block."""
        errors = self._errors(self._taken[..., :BLOCK].float(), slice(0, BLOCK))
        ahead = self._moved[:, :, None] + _product(errors, self._upper[:, :BLOCK])
        if self._kernels is None:
            origin = self._extend(ahead)
        else:
            columns, factor = (self._original, self._scale, self._zero), (self._upper, self._pivots)
            origin = advance(self._kernels, ahead, self._cost, columns, factor, self._levels, self._codes.top)
        moved = self._taken.gather(2, origin[..., None].expand_as(self._taken))
        moved[..., BLOCK:] = ahead
        self._taken = moved

    def _extend(self, ahead: Tensor) -> Tensor:
        """Replace the weights of the block by codes. Return the path that each path comes from."""
        n, rows = self._cost.shape[:2]
        origin = torch.arange(self._n_paths, device=ahead.device).expand(n, rows, -1)
        places = origin.float()[..., None]
        for first in range(0, BLOCK, STRIP):
            # Columns of the strip (codes once they are taken), then the place each path comes from.
            strip = torch.cat((ahead[..., first : first + STRIP], places), -1)
            for at in range(STRIP):
                strip = self._column(strip, first, at)
            place, taken = strip[..., STRIP:].long(), strip[..., :STRIP]
            origin = origin.gather(2, place[..., 0])
            ahead.copy_(ahead.gather(2, place.expand_as(ahead)))
            ahead[..., first : first + STRIP] = taken
            now, later = slice(BLOCK + first, BLOCK + first + STRIP), slice(first + STRIP, BLOCK)
            ahead[..., later] += _product(self._errors(taken, now), self._upper[:, now, later])
        return origin

    def _errors(self, taken: Tensor, columns: slice) -> Tensor:
        """Errors of codes (L, rows, paths, columns), in units of the row."""
        scale, zero = self._scale[:, :, None, columns], self._zero[:, :, None, columns]
        return self._original[:, :, None, columns] - self._codes.step(taken, zero) * scale

    def _column(self, strip: Tensor, first: int, at: int) -> Tensor:
        """Extend each path by its two nearest codes and keep the cheapest of all."""
        column = slice(BLOCK + first + at, BLOCK + first + at + 1)
        scale, zero, codes = self._scale[..., column], self._zero[..., column], self._codes
        wanted = strip[..., at]
        near, other, none = codes.two(wanted / scale, zero)
        both = torch.stack((near, other), 2)
        gap = torch.addcmul(wanted[:, :, None], codes.step(both, zero[..., None]), scale[..., None], value=-1)
        pivots = self._pivots[:, first + at, None, None, None]
        cost = torch.addcmul(self._cost[:, :, None], gap * gap, pivots)
        cost[:, :, 1].masked_fill_(none, math.inf)
        cost, chosen = cost.flatten(2).sort(dim=-1, stable=True)
        chosen = chosen[..., : self._n_paths]
        self._cost = cost[..., : self._n_paths] - cost[..., :1]
        strip = strip.gather(2, (chosen % self._n_paths)[..., None].expand_as(strip))
        code = both.flatten(2).gather(2, chosen)
        strip[..., at] = code
        if at + 1 < STRIP:
            error = torch.addcmul(self._original[..., column], codes.step(code, zero), scale, value=-1)
            a = self._upper[:, BLOCK + first + at, first + at + 1 : first + STRIP]
            strip[..., at + 1 : STRIP].addcmul_(error[..., None], a[:, None, None])
        return strip


def _product(errors: Tensor, upper: Tensor) -> Tensor:
    """Errors (L, rows, paths, k) times matrices (L, k, m)."""
    n, rows, paths, k = errors.shape
    return (errors.reshape(n, rows * paths, k) @ upper).view(n, rows, paths, -1)


def _power_of_two(x: Tensor) -> Tensor:
    """Return the largest power of two that is not above a positive number."""
    below = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1)
    return torch.where(x > torch.finfo(torch.float32).tiny, below, 1.0)
