"""GPTQ's sweep (gptq/batch.rs): the nearest code column by column. Later columns compensate for each error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loopq._native import BLOCK_SIZE
from loopq.quantizers.twin.descent import spread
from loopq.quantizers.twin.factor import Factors
from loopq.quantizers.twin.grid import Codes


@dataclass(frozen=True)
class Swept:
    """Codes (L, rows, places), uint8; scales and zero points (L, rows, groups)."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    #: tr(D S D^T) of each row, and the damping's share of it: (L, rows).
    damped: Tensor
    added: Tensor


def sweep(target: Tensor, factors: Factors, codes: Codes, known: tuple[Tensor, Tensor] | None) -> Swept:
    """Round targets (L, rows, places), float32.

    If scales and zero points (L, rows, groups) are not known, the sweep computes them when it reaches a group.
    """
    n, rows, d = target.shape
    kind = factors.upper.dtype
    wide = target.to(kind)
    errors, out = torch.zeros_like(wide), torch.zeros_like(target, dtype=torch.uint8)
    damped = torch.zeros(n, rows, dtype=torch.float64, device=target.device)
    added, mu = torch.zeros_like(damped), factors.mu.gather(1, factors.order)
    levels = None if known is None else [factors.in_order(spread(codes, x, d)) for x in known]
    groups: list[tuple[Tensor, Tensor]] = []
    for first in range(0, d, BLOCK_SIZE):
        last = min(d, first + BLOCK_SIZE)
        moved = wide[..., first:last] + errors[..., :first] @ factors.upper[:, :first, first:last]
        for j in range(first, last):
            if levels is None:
                if j % codes.width == 0:
                    groups.append(_begin_group(wide, errors, factors, codes, j))
                scale, zero = groups[-1]
            else:
                scale, zero = levels[0][..., j], levels[1][..., j]
            column = moved[..., j - first]
            updated = column.double()
            code = codes.code(updated / scale.double(), zero.double())
            value = codes.step(code.float(), zero) * scale
            error = wide[..., j] - value.to(kind)
            damped += factors.pivots[:, j, None] * (updated - value.double()) ** 2
            added += mu[:, j, None] * error.double() ** 2
            out[..., j], errors[..., j] = code, error
            moved[..., j - first + 1 :] += error[..., None] * factors.upper[:, None, j, j + 1 : last]
    scale, zero = known or (torch.stack(x, -1) for x in zip(*groups, strict=True))
    return Swept(out, scale, zero, damped, added)


def _begin_group(
    wide: Tensor, errors: Tensor, factors: Factors, codes: Codes, first: int
) -> tuple[Tensor, Tensor]:
    """Scales from the best real-valued continuation, w + (E A) A_gg^-1; A_gg is the group's unit upper triangle."""
    last = min(wide.shape[2], first + codes.width)
    group = wide[..., first:last]
    shift = errors[..., :first] @ factors.upper[:, :first, first:last]
    square = factors.upper[:, first:last, first:last]
    lines = group + torch.linalg.solve_triangular(square, shift, upper=True, left=False, unitriangular=True)
    weights = factors.pivots[:, None, None, first:last]
    scale, zero = codes.fit(lines.double()[..., None, :], weights)
    return scale[..., 0], zero[..., 0]
