"""The solver under a metric on both sides, tr(A D S D^T) (coordinate/coupled.rs), for all blocks of all layers.

Rows of a block are solved tile by tile. Each target compensates for the errors of the rows before it. Then each row is
descended with all others fixed, and changes that lower the whole loss are taken. Blocks are independent, so a step
takes one tile of each block of each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loopq._native import LANES, TOGETHER
from loopq.quantizers.twin.descent import Rows, spread
from loopq.quantizers.twin.factor import Factors, permuted
from loopq.quantizers.twin.settle import Stages, descend, settle


@dataclass(frozen=True)
class Left:
    """Metrics between outputs, (L, blocks, b, b). Each block is in the order in which its rows are solved.

    Parameters
    ----------
    metric : Tensor, float64
        A. Blocks with fewer rows are padded with zeros.
    upper : Tensor, float64
        The unit upper triangular U of A = U diag(p) U^T.
    row : Tensor, int64, shape (L, blocks, b)
        Row of the weight at each place. Empty places hold the number of rows.
    """

    metric: Tensor
    upper: Tensor
    row: Tensor

    @classmethod
    def of(cls, blocks: Sequence[Tensor], names: Sequence[str]) -> Left:
        """Build from blocks of consecutive rows, each (L, b, b). Only the last block may be smaller."""
        n, size = blocks[0].shape[:2]
        rows = sum(block.shape[1] for block in blocks)
        lefts, first = [], 0
        whole = [block for block in blocks if block.shape[1] == size]
        parts = [torch.stack(whole, 1), *(block[:, None] for block in blocks[len(whole) :])]
        for part in parts:
            count, side = part.shape[1:3]
            flat = part.flatten(0, 1)
            none = flat.new_zeros(flat.shape[:2])
            factors = Factors.of(flat, none, "conditional", [name for name in names for _ in range(count)])
            starts = first + side * torch.arange(count, device=flat.device)
            row = factors.order.view(n, count, side) + starts[:, None]
            pad = (0, size - side)
            square = torch.nn.functional.pad(permuted(factors.matrix, factors.order), pad * 2)
            upper = torch.nn.functional.pad(torch.triu(factors.upper, 1), pad * 2)
            upper = upper + torch.eye(size, dtype=upper.dtype, device=upper.device)
            square, upper = (x.view(n, count, size, size) for x in (square, upper))
            lefts.append(cls(square, upper, torch.nn.functional.pad(row, pad, value=rows)))
            first += count * side
        return cls(*(torch.cat([getattr(m, f) for m in lefts], 1) for f in ("metric", "upper", "row")))


@dataclass(frozen=True)
class Coupled:
    """Codes (L, rows, d), scales and zero points (L, rows, groups), and the losses of each layer (L)."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    swept: Tensor
    settled: Tensor
    replaced: Tensor


def coupled(target: Tensor, factors: Factors, left: Left, stages: Stages, passes: int) -> Coupled:
    """Solve layers (L, rows, d), float32."""
    blocks = _Blocks(target, factors, left, stages)
    for first in range(0, left.row.shape[2], LANES):
        blocks.sweep(slice(first, first + LANES))
    blocks.image = (blocks.error.flatten(1, 2) @ factors.matrix).view_as(blocks.error)
    swept = blocks.loss()
    for _ in range(passes):
        before = blocks.replaced.clone()
        for first in range(0, left.row.shape[2], TOGETHER):
            blocks.go_on(slice(first, first + TOGETHER))
        if bool((blocks.replaced == before).all()):
            break
    return blocks.finish(swept)


class _Blocks:
    """All blocks, by place: tensors (L, blocks, b, ...)."""

    def __init__(self, target: Tensor, factors: Factors, left: Left, stages: Stages) -> None:
        self._factors, self._left, self._stages = factors, left, stages
        n, rows, d = target.shape
        self._there = left.row < rows
        padded = torch.cat((target, target.new_zeros(n, 1, d)), 1)
        place = left.row.flatten(1)[..., None].expand(-1, -1, d)
        self._target = padded.gather(1, place).view(*left.row.shape, d)
        self._rows = rows
        groups = -(-d // stages.codes.width)
        self.error = torch.zeros_like(self._target, dtype=torch.float64)
        #: D S, once the sweep has ended.
        self.image = self.error.new_zeros(0)
        self._steps = torch.zeros_like(self._target)
        self._scale = target.new_ones(*left.row.shape, groups)
        self._zero = torch.zeros_like(self._scale)
        self.replaced = torch.zeros(n, dtype=torch.int64, device=target.device)

    def sweep(self, tile: slice) -> None:
        """Solve a tile of each block for the first time.

        Rows of the same tile have no codes yet. Their best real values are used instead.
        """
        upper, codes = self._left.upper, self._stages.codes
        shift = upper[:, :, : tile.start, tile].mT @ self.error[:, :, : tile.start]
        square = upper[:, :, tile, tile].mT
        shift = torch.linalg.solve_triangular(square, shift, upper=False, unitriangular=True)
        target = self._target[:, :, tile]
        wanted = (target - shift).float()
        solved = settle(wanted.flatten(1, 2), self._factors, self._stages)
        shape = wanted.shape
        steps = codes.step(solved.codes.float(), spread(codes, solved.zero, shape[3])).view(shape)
        self._steps[:, :, tile] = steps
        self._scale[:, :, tile] = solved.scale.view(*shape[:3], -1)
        self._zero[:, :, tile] = solved.zero.view(*shape[:3], -1)
        values = (steps * spread(codes, self._scale[:, :, tile], shape[3])).double()
        self.error[:, :, tile] = torch.where(self._there[:, :, tile, None], values - target, 0.0)

    def go_on(self, tile: slice) -> None:
        """Descend in some rows of each block with all others fixed. Keep the changes that lower the whole loss."""
        codes, there = self._stages.codes, self._there[:, :, tile]
        metric = self._left.metric[:, :, tile]
        slope = metric @ self.image
        square = metric[..., tile]
        # An empty place has no diagonal entry and does not move.
        size = torch.where(there, square.diagonal(dim1=2, dim2=3), 1.0)[..., None]
        error, image, steps = self.error[:, :, tile], self.image[:, :, tile], self._steps[:, :, tile]
        scale, zero = self._scale[:, :, tile], self._zero[:, :, tile]
        values = (steps * spread(codes, scale, steps.shape[3])).double()
        gradient = slope / size
        begun = (steps, values, gradient, scale, zero, (error * image).sum(3), there)
        rows = Rows(*(x.flatten(1, 2).clone() for x in begun))
        descend(rows, self._factors.matrix, self._stages)
        change = rows.values.view_as(values) - values
        moved = rows.gradient.view_as(gradient) - gradient
        taken = _falling(change, moved, slope, square, size, there)
        self.replaced += taken.sum((1, 2))
        error += torch.where(taken[..., None], change, 0.0)
        image += torch.where(taken[..., None], moved, 0.0)
        steps.copy_(torch.where(taken[..., None], rows.steps.view_as(steps), steps))
        scale.copy_(torch.where(taken[..., None], rows.scale.view_as(scale), scale))

    def loss(self) -> Tensor:
        """tr(A D S D^T) of each layer."""
        return ((self._left.metric @ self.image) * self.error).sum((1, 2, 3))

    def finish(self, swept: Tensor) -> Coupled:
        """Return all results in the order of the weight's rows."""
        codes = self._stages.codes
        taken = codes.code_of(self._steps, spread(codes, self._zero, self._steps.shape[3]))
        taken, scale, zero = (self._by_row(x) for x in (taken, self._scale, self._zero))
        return Coupled(taken, scale, zero, swept, self.loss(), self.replaced)

    def _by_row(self, places: Tensor) -> Tensor:
        row = self._left.row.flatten(1)[..., None].expand(-1, -1, places.shape[3])
        out = places.new_zeros(len(places), self._rows + 1, places.shape[3])
        return out.scatter_(1, row, places.flatten(1, 2))[:, : self._rows]


def _falling(
    change: Tensor, moved: Tensor, slope: Tensor, metric: Tensor, size: Tensor, there: Tensor
) -> Tensor:
    """Find the rows that lower the whole loss, in order: a row sees the changes taken before it."""
    gain = (change * (2.0 * slope + size * moved)).sum(3)
    between = 2.0 * metric * (change @ moved.mT)
    taken = torch.zeros_like(there)
    for i in range(there.shape[2]):
        taken[..., i] = (gain[..., i] < 0) & there[..., i]
        gain += torch.where(taken[..., i, None], between[..., i], 0.0)
    return taken
