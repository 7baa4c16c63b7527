"""The solver's kernels, `beam.cu` and `descent.cu`, on small layers beside torch's operations on the processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from loopq.quantizers.twin.descent import change_codes, change_scales
from tests.support.twins import CPU, rounded, searched

_EVEN: dict[str, Any] = {"bits": 3, "group_size": 16}
_TABLE: dict[str, Any] = {"bits": 4, "group_size": 32, "levels": "uneven"}


def verify_solver(device: torch.device, paths: Sequence[int]) -> dict[str, float]:
    """Shares of codes that a device has in common with the processor.

    Parameters
    ----------
    device : torch.device
        On a CUDA device the kernels run.
    paths : sequence of int
        Numbers of paths of the beam.

    Returns
    -------
    dict
        The least share over both grids, for each number of paths (`beam_2`) and for `descent`.
    """
    grids = (_EVEN, _TABLE)
    shares = {f"beam_{n}": min(_beam(device, n, grid) for grid in grids) for n in paths}
    return {**shares, "descent": min(_descent(device, grid) for grid in grids)}


def _beam(device: torch.device, n_paths: int, grid: dict[str, Any]) -> float:
    wanted, codes = (searched(150, n_paths, at, **grid).cpu() for at in (CPU, device))
    return float((codes == wanted).float().mean())


def _descent(device: torch.device, grid: dict[str, Any]) -> float:
    steps = []
    for at in (CPU, device):
        s, codes, rows = rounded(150, True, at, **grid)
        for _ in range(2):
            change_codes(rows, s, codes, 30)
            change_scales(rows, s, codes)
        steps.append(rows.steps.cpu())
    return float((steps[0] == steps[1]).float().mean())
