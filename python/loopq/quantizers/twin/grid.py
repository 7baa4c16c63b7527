"""Values of codes, types of scales, and the search for scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loopq._native import SHRINK_STEPS
from loopq.errors import SolveError
from loopq.layers.grid import SIGNIFICANT_BITS, Grid, ScaleSearch

#: Elements of one array that the search holds at once.
AT_ONCE = 1 << 25
_STORED = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Codes:
    """The codes of a plain grid, stored with an offset: 0 .. top.

    Parameters
    ----------
    grid : Grid
        The grid. It must be plain.
    width : int
        Columns of a group.
    search : {"max", "half-range", "mse"}
        Search for scales. The settings describe the three kinds.
    signed : bool
        Allow negative scales on a symmetric grid.
    scale_bits : int, optional
        Significant bits of a scale. All bits of the type when absent.
    table : Tensor, optional
        Levels (float32) of a grid with a table.
    """

    grid: Grid
    width: int
    search: ScaleSearch
    signed: bool
    scale_bits: int | None
    table: Tensor | None

    @classmethod
    def of(
        cls,
        grid: Grid,
        columns: int,
        search: ScaleSearch,
        signed: bool,
        scale_bits: int | None,
        device: torch.device,
    ) -> Codes:
        """Return the codes of a layer with this number of columns."""
        levels = grid.levels
        table = None if levels is None else torch.from_numpy(levels).to(device)
        asked = signed if grid.signed is None else grid.signed
        return cls(grid, grid.width(columns), search, asked and grid.symmetric, scale_bits, table)

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.grid.bits) - 1 if self.table is None else len(self.table) - 1

    @property
    def middle(self) -> int:
        """Zero point of a symmetric grid."""
        return 1 << (self.grid.bits - 1)

    @property
    def between(self) -> Tensor:
        """Midpoints of the table's levels, float64."""
        assert self.table is not None
        wide = self.table.double()
        return (wide[1:] + wide[:-1]) / 2

    def code(self, steps: Tensor, zero: Tensor) -> Tensor:
        """Return the code nearest to values in scales. Ties go to the even code, with a table to the higher."""
        if self.table is None:
            return (steps.round() + zero).clamp_(0, self.top)
        return self._place(steps).to(steps.dtype)

    def step(self, code: Tensor, zero: Tensor) -> Tensor:
        """Return the value of a code, in units of the scale."""
        return code - zero if self.table is None else self.table[code.long()].to(code.dtype)

    def code_of(self, steps: Tensor, zero: Tensor) -> Tensor:
        """Return the code, uint8, of steps that lie on the grid."""
        return self.code(steps, zero).to(torch.uint8)

    def two(self, steps: Tensor, zero: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the nearest code or its neighbour, the code on the other side, and whether that one is missing."""
        if self.table is None:
            x = steps + zero
            near = x.round().clamp_(0, self.top)
            higher = x > near
        else:
            place = self._place(steps)
            near, higher = place.to(steps.dtype), steps > self.table[place]
        other = near + torch.where(higher, 1.0, -1.0)
        held = other.clamp(0, self.top)
        return near, held, held != other

    def _place(self, steps: Tensor) -> Tensor:
        return torch.bucketize(steps.contiguous(), self.between.to(steps.dtype), right=True)

    def rounded(self, scale: Tensor) -> Tensor:
        """Round through float32 to the stored type, half to even."""
        single = scale.float()
        if self.scale_bits is not None and self.scale_bits < SIGNIFICANT_BITS[self.grid.scale_dtype]:
            mantissa, exponent = torch.frexp(single.double())
            kept = (mantissa * 2.0**self.scale_bits).round() / 2.0**self.scale_bits
            single = torch.ldexp(kept, exponent).float()
        return single.to(_STORED[self.grid.scale_dtype]).float()

    def widest(self, low: Tensor, high: Tensor) -> Tensor:
        """Return the core's scale that clips nothing between `low` <= 0 and `high` >= 0."""
        if not self.grid.symmetric:
            return (high - low) / self.top
        if self.table is not None:
            below, above = self.table[0].double(), self.table[-1].double()
            return torch.maximum(high / above, low / below)
        if self.search == "half-range":
            return torch.maximum(high, -low) / (self.top / 2)
        if self.signed:
            return torch.maximum(high / (self.middle - 1), -low / self.middle)
        return torch.maximum(high, -low) / (self.middle - 1)

    def groups(self, values: Tensor) -> Tensor:
        """Reshape values (..., columns) to (..., groups, width). A shorter last group is padded with zeros."""
        missing = -values.shape[-1] % self.width
        if missing:
            values = torch.nn.functional.pad(values, (0, missing))
        return values.unflatten(-1, (-1, self.width))

    def fit(self, lines: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point of each group.

        Parameters
        ----------
        lines : Tensor, float64, shape (..., groups, width)
            Values of the groups.
        weights : Tensor, float64, broadcast to `lines`
            Weight of a squared error.

        Returns
        -------
        scale, zero : Tensor, float32, shape (..., groups)
            The scale is infinite if no value of the stored type fits (`refuse_scales`).
        """
        low, high = lines.amin(-1).clamp_max_(0), lines.amax(-1).clamp_min_(0)
        tried = torch.arange(SHRINK_STEPS if self.search == "mse" else 1, device=lines.device)
        # Each is smaller than the one before by a hundredth of the largest.
        shrinks = 1.0 - tried.double() / 100.0
        scale = zero = torch.ones_like(low, dtype=torch.float32)
        cost = torch.full_like(low, math.inf)
        for sign in (1.0, -1.0) if self.signed else (1.0,):
            for part in shrinks.split(max(1, AT_ONCE // max(1, lines.numel()))):
                new_scale, new_zero, new_cost = self._cheapest(lines, weights, (low, high), sign, part)
                less = new_cost < cost
                scale, zero = torch.where(less, new_scale, scale), torch.where(less, new_zero, zero)
                cost = torch.where(less, new_cost, cost)
        value = self.widest(low, high)
        none = cost == math.inf
        near = none & (self.rounded(value) == 0)
        held = self.table is not None and not bool((self.table == 0).any())
        least = _least(self.grid.scale_dtype) if held else 1.0
        scale = torch.where(near, least, torch.where(none, math.inf, scale))
        middle = float(self.middle if self.grid.symmetric else 0)
        return scale, torch.where(none, middle, zero)

    def _cheapest(
        self, lines: Tensor, weights: Tensor, ends: tuple[Tensor, Tensor], sign: float, shrinks: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return scale, zero point and cost of the cheapest shrunken scale. The cost is infinite if none fits."""
        low, high = ends if sign > 0 else (-ends[1], -ends[0])
        shrinks = shrinks.view(-1, *(1,) * low.dim())
        scale = self.rounded(self.widest(low, high) * shrinks)
        fits = (scale != 0) & scale.isfinite()
        scale = torch.where(fits, scale, 1.0)
        if self.grid.symmetric:
            zero = torch.full_like(scale, self.middle)
        else:
            zero = (-low * shrinks / scale.double()).round().clamp_(0, self.top).float()
        scale = scale * sign
        codes = self.code(lines / scale.double()[..., None], zero.double()[..., None]).float()
        values = self.step(codes, zero[..., None]) * scale[..., None]
        cost = ((lines - values) ** 2 * weights).sum(-1)
        cost, at = torch.where(fits, cost, math.inf).min(0)
        return scale.gather(0, at[None])[0], zero.gather(0, at[None])[0], cost


def _least(scale_dtype: str) -> float:
    """Return the smallest number that a scale type holds in full precision."""
    return 2.0**-14 if scale_dtype == "float16" else 2.0**-126


def refuse_scales(scale: Tensor, names: Sequence[str], codes: Codes) -> None:
    """Refuse scales (L, rows, groups) if one is infinite.

    Raises
    ------
    SolveError
        The message names the layers of that input, and the group.
    """
    bad = scale.isinf().nonzero()
    if len(bad):
        at, row, group = map(int, bad[0])
        raise SolveError(
            f"layer {names[at]}: the scale of row {row}, group {group} is infinite in {codes.grid.scale_dtype}; use "
            "bfloat16 or float32 scales"
        )
