"""The paths of GPTQ's sweep through one block of columns: the launch of `beam.cu`.

The torch operations of `loopq.quantizers.twin.beam` are its reference.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from loopq._native import BEAM_COLUMNS as BLOCK
from loopq.quantizers.cuda.load import Backend, Kernel

#: Numbers of paths. Those of a row lie in the shared memory of a block.
POWERS = (2, 4, 8, 16, 32, 64)


def advance(
    backend: Backend,
    ahead: Tensor,
    cost: Tensor,
    columns: tuple[Tensor, Tensor, Tensor],
    factor: tuple[Tensor, Tensor],
    levels: tuple[Tensor, Tensor] | None,
    top: int,
) -> Tensor:
    """Extend the paths of rows through a block of 64 columns. Return the path that each comes from.

    Parameters
    ----------
    backend : Backend
    ahead : Tensor, float32, shape (L, rows, paths, 64)
        Weights of this block, moved by all errors before it. They are replaced by the codes.
    cost : Tensor, float32, shape (L, rows, paths)
        Cost of a path above the best. The cost after the block replaces it.
    columns : tuple of Tensor, float32, shape (L, rows, 128)
        Weights, scales and zero points. Their last 64 columns are this block.
    factor : tuple of Tensor, float32
        A, shape (L, 128, 64), with this block's rows last, and pivots, shape (L, 64).
    levels : tuple of Tensor, float32, or None
        Values of the codes and the midpoints between them. Without them a code's value is code minus zero point.
    top : int
        The largest code.

    Returns
    -------
    Tensor, int64, shape (L, rows, paths)

    Notes
    -----
    All tensors are contiguous, on the backend's device. `paths` is one of `POWERS`. Each path has two
    extensions in each column: the nearest code and its neighbour. Of equal costs the first is taken.
    """
    n, rows, paths, _ = ahead.shape
    origin = torch.empty((n, rows, paths), dtype=torch.int64, device=ahead.device)
    table = [0, 0] if levels is None else [x.data_ptr() for x in levels]
    words, warps = 2 * paths * (BLOCK + 1) + 4 * paths + BLOCK, min(4, 64 // paths)
    backend.launch(
        Kernel("beam.cu", "loopq_beam", (f"-DLQ_PATHS={paths}",)),
        (-(-n * rows // warps), 1),
        32 * warps,
        4 * words * warps,
        (
            *(x.data_ptr() for x in (ahead, origin, cost, *columns, *factor)),
            *table,
            *(np.int32(x) for x in (n * rows, rows, top)),
        ),
    )
    return origin
