"""Running small NumPy products on one thread."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from loopq.lazy import require

#: Multiply-adds from which a product may use all threads: about ten milliseconds on one thread.
LARGE = 1 << 29


class OneThread:
    """Keeps NumPy's BLAS on one thread where several threads would wait for each other.

    Notes
    -----
    The threads of torch's pool keep spinning for a while after a product. If they occupy all cores, a small product of
    NumPy's BLAS that is split over as many threads waits for the slowest of them: collecting loop metrics took three
    times as long with two threads as with one (docs/performance.md). On one thread a product also has the same bits
    whatever the number of threads.

    Finding the BLAS libraries takes longer than a small product, so it is done once, in the constructor.
    """

    def __init__(self) -> None:
        self._pools: Any = require("threadpoolctl").ThreadpoolController()

    def __call__(self) -> AbstractContextManager[Any]:
        """Limit BLAS to one thread inside the block."""
        limit: AbstractContextManager[Any] = self._pools.limit(limits=1, user_api="blas")
        return limit

    def where_small(self, n_products: int) -> AbstractContextManager[Any]:
        """Limit BLAS to one thread inside the block if it has fewer than `LARGE` multiply-adds."""
        return self() if n_products < LARGE else contextlib.nullcontext()
