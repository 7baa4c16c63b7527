"""GPTQ's sweep with several open paths of codes in each row (gptq/beam.rs). Each column keeps the cheapest paths.

Paths are in single precision, in units of a power of two per row. The errors of decided codes reach later columns in
double precision. The caller takes only codes from here.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from loopq.quantizers.twin.descent import spread
from loopq.quantizers.twin.factor import Factors
from loopq.quantizers.twin.grid import Codes

#: Columns of a block; codes are decided one block later.
BLOCK = 64
#: Columns of a strip. Inside a strip errors reach the next columns at once; later strips get them together at its end.
STRIP = 16
#: Paths that are open at once, over all rows. A path takes some KiB.
PATHS = 1 << 20


def search(
    target: Tensor,
    factors: Factors,
    codes: Codes,
    known: tuple[Tensor, Tensor],
    n_paths: int,
    kept: dict[Any, Paths],
) -> Tensor:
    """Codes (L, rows, places), uint8, of targets (L, rows, places), float32.

    `known` holds scales and zero points (L, rows, groups). `kept` is shared by searches of the same shape.
    """
    height = max(1, PATHS // (n_paths * len(target)))
    found = []
    for first in range(0, target.shape[1], height):
        own = slice(first, first + height)
        scale, zero = (levels[:, own] for levels in known)
        found.append(_Search(target[:, own], factors, codes, scale, zero).run(n_paths, kept))
    return torch.cat(found, 1)


class _Search:
    """Some rows on their way through the blocks. Columns are padded to whole blocks."""

    def __init__(self, target: Tensor, factors: Factors, codes: Codes, scale: Tensor, zero: Tensor) -> None:
        d = target.shape[2]
        self._codes, self._d, self._padding = codes, d, -d % BLOCK
        self._target = self._padded(target, 0.0)
        self._unit = _power_of_two(scale.abs().double().mean(2).float())[..., None]
        by_place = [factors.in_order(spread(codes, x, d)) for x in (scale, zero)]
        self._scale, self._zero = self._padded(by_place[0], 1.0), self._padded(by_place[1], 0.0)
        pivot_unit = _power_of_two(factors.pivots.mean(1).float())[:, None]
        # A padding column costs nothing, and its error reaches no other column.
        self._pivots = self._padded((factors.pivots / pivot_unit).float(), 0.0)
        self._upper = torch.nn.functional.pad(torch.triu(factors.upper.double(), 1), (0, self._padding) * 2)
        self._errors = torch.zeros_like(self._target, dtype=torch.float64)
        self._out = torch.zeros_like(self._target, dtype=torch.uint8)

    def run(self, n_paths: int, kept: dict[Any, Paths]) -> Tensor:
        """Codes (L, rows, places)."""
        shape = self._target.shape[:2]
        if shape not in kept:
            kept[shape] = Paths(self._codes, self._target, n_paths)
        paths = kept[shape]
        paths.restart()
        for first in range(0, self._d, BLOCK):
            before, own = slice(first - BLOCK, first), slice(first, first + BLOCK)
            # This decides the codes of the block before the last.
            self._take(slice(before.start - BLOCK, before.start), paths.decide())
            known = max(0, before.start)
            moved = self._errors[..., :known] @ self._upper[:, :known, own] + self._target[..., own]
            paths.begin((moved / self._unit).float(), self._pivots[:, own])
            for side, block in enumerate((before, own)):
                if block.start >= 0:
                    self._show(paths, slice(side * BLOCK, (side + 1) * BLOCK), block)
                    paths.upper[:, side * BLOCK : (side + 1) * BLOCK] = self._upper[:, block, own].float()
            paths.advance()
        last = (self._d - 1) // BLOCK * BLOCK
        self._take(slice(last - BLOCK, last), paths.decide())
        self._out[..., last:] = paths.decide()
        return self._out[..., : self._d]

    def _show(self, paths: Paths, place: slice, block: slice) -> None:
        paths.original[..., place] = self._target[..., block] / self._unit
        paths.scale[..., place] = self._scale[..., block] / self._unit
        paths.zero[..., place] = self._zero[..., block]

    def _take(self, block: slice, decided: Tensor) -> None:
        """Store the codes of a block and their errors."""
        if block.start < 0:
            return
        self._out[..., block] = decided
        value = self._codes.step(decided.float(), self._zero[..., block]) * self._scale[..., block]
        self._errors[..., block] = self._target[..., block].double() - value

    def _padded(self, values: Tensor, by: float) -> Tensor:
        return torch.nn.functional.pad(values, (0, self._padding), value=by)


class Paths:
    """Paths of many rows through one block of columns. All tensors keep their addresses.

    Parameters
    ----------
    codes : Codes
        Values of the codes.
    target : Tensor, float32, shape (L, rows, places)
        The rows. Only their shape and device are used.
    n_paths : int
        Paths of each row.
    """

    def __init__(self, codes: Codes, target: Tensor, n_paths: int) -> None:
        n, rows = target.shape[:2]

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=target.device)

        self._codes, self._n_paths = codes, n_paths
        #: For the previous block and this one, in units of the row.
        self.original, self.scale, self.zero = (zeros(n, rows, 2 * BLOCK) for _ in range(3))
        self.scale.fill_(1.0)
        #: A, both blocks by this one.
        self.upper = zeros(n, 2 * BLOCK, BLOCK)
        self._pivots = zeros(n, BLOCK)
        #: This block's weights, moved by the errors of all columns except those of the previous block.
        self._moved = zeros(n, rows, BLOCK)
        self._taken = zeros(n, rows, n_paths, 2 * BLOCK, dtype=torch.uint8)
        #: Cost above the best path, which is the first; infinite for an unused place.
        self._cost = zeros(n, rows, n_paths)
        #: The nearest code of each path and its neighbour on the other side.
        self._both = zeros(n, rows, 2, n_paths)
        self.advance = Replayed(self._advance, target.device)

    def restart(self) -> None:
        """Reset to one path before the first block."""
        self._cost.fill_(math.inf)
        self._cost[..., 0] = 0.0
        for tensor in (self.original, self.zero, self.upper, self._taken):
            tensor.zero_()

    def begin(self, moved: Tensor, pivots: Tensor) -> None:
        """Load the next block of columns."""
        self._moved.copy_(moved)
        self._pivots.copy_(pivots)

    def decide(self) -> Tensor:
        """Decide the previous block by the best path. Paths with other codes end. This block becomes the previous."""
        decided = self._taken[:, :, 0, :BLOCK].clone()
        others = (self._taken[..., :BLOCK] != decided[:, :, None]).any(-1)
        self._cost.masked_fill_(others, math.inf)
        self._taken[..., :BLOCK] = self._taken[..., BLOCK:]
        return decided

    def _advance(self) -> None:
        """Extend the paths through the block."""
        errors = self._errors(self._taken[..., :BLOCK].float(), slice(0, BLOCK))
        ahead = self._moved[:, :, None] + _product(errors, self.upper[:, :BLOCK])
        n, rows = self._cost.shape[:2]
        places = torch.arange(self._n_paths, device=ahead.device).float().expand(n, rows, -1)[..., None]
        for first in range(0, BLOCK, STRIP):
            # Columns of the strip (codes once they are taken), then the place each path comes from.
            strip = torch.cat((ahead[..., first : first + STRIP], places), -1)
            for at in range(STRIP):
                strip = self._column(strip, first, at)
            own, origin = slice(first, first + STRIP), strip[..., STRIP:].long()
            taken = strip[..., :STRIP]
            moved = self._taken.gather(2, origin.expand_as(self._taken))
            moved[..., BLOCK + first : BLOCK + first + STRIP] = taken
            self._taken.copy_(moved)
            if first + STRIP < BLOCK:
                errors = self._errors(taken, slice(BLOCK + first, BLOCK + first + STRIP))
                ahead = ahead.gather(2, origin.expand_as(ahead))
                later = slice(first + STRIP, BLOCK)
                ahead[..., later] += _product(errors, self.upper[:, BLOCK:][:, own, later])

    def _errors(self, taken: Tensor, columns: slice) -> Tensor:
        """Errors of codes (L, rows, paths, columns), in units of the row."""
        scale, zero = self.scale[:, :, None, columns], self.zero[:, :, None, columns]
        return self.original[:, :, None, columns] - self._codes.step(taken, zero) * scale

    def _column(self, strip: Tensor, first: int, at: int) -> Tensor:
        """Extend each path by its two nearest codes and keep the cheapest of all."""
        column = slice(BLOCK + first + at, BLOCK + first + at + 1)
        scale, zero, codes = self.scale[..., column], self.zero[..., column], self._codes
        wanted, both = strip[..., at], self._both
        near, other, none = codes.two(wanted / scale, zero)
        both[:, :, 0], both[:, :, 1] = near, other
        gap = torch.addcmul(wanted[:, :, None], codes.step(both, zero[..., None]), scale[..., None], value=-1)
        pivots = self._pivots[:, first + at, None, None, None]
        cost = torch.addcmul(self._cost[:, :, None], gap * gap, pivots)
        cost[:, :, 1].masked_fill_(none, math.inf)
        cost, chosen = cost.flatten(2).sort(dim=-1, stable=True)
        chosen = chosen[..., : self._n_paths]
        torch.sub(cost[..., : self._n_paths], cost[..., :1], out=self._cost)
        strip = strip.gather(2, (chosen % self._n_paths)[..., None].expand_as(strip))
        code = both.flatten(2).gather(2, chosen)
        strip[..., at] = code
        if at + 1 < STRIP:
            error = torch.addcmul(self.original[..., column], codes.step(code, zero), scale, value=-1)
            a = self.upper[:, BLOCK + first + at, first + at + 1 : first + STRIP]
            strip[..., at + 1 : STRIP].addcmul_(error[..., None], a[:, None, None])
        return strip


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable the cycle collector: freeing a finished graph would break the one being recorded."""
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Replayed:
    """A function over tensors at fixed addresses. On a GPU it is recorded as one graph of kernels and replayed.

    A step of a beam is about twenty small kernels, which take longer to launch than to run.
    """

    def __init__(self, run: Callable[[], None], device: torch.device) -> None:
        self._run, self._records, self._calls = run, device.type == "cuda", 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Run the function. The first call is not recorded, so that libraries can initialise."""
        self._calls += 1
        if not self._records or self._calls == 1:
            self._run()
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with uncollected(), torch.cuda.graph(self._graph):
                self._run()
        self._graph.replay()


def _product(errors: Tensor, upper: Tensor) -> Tensor:
    """Errors (L, rows, paths, k) times matrices (L, k, m)."""
    n, rows, paths, k = errors.shape
    return (errors.reshape(n, rows * paths, k) @ upper).view(n, rows, paths, -1)


def _power_of_two(x: Tensor) -> Tensor:
    """Return the largest power of two that is not above a positive number."""
    below = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1)
    return torch.where(x > torch.finfo(torch.float32).tiny, below, 1.0)
