"""Products of NumPy that are too small to be shared out between threads."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from loopq.lazy import require

#: Multiply-adds from which a product may use all threads: some ten milliseconds of one.
LARGE = 1 << 29


class OneThread:
    """Keeps NumPy's BLAS on one thread where more would only wait for each other.

    Notes
    -----
    torch has a pool of threads of its own, which goes on looking for work for a while after a product. On a machine
    whose cores are all taken by it, a small product of NumPy's BLAS that is cut in as many parts waits for the last
    of them: collecting loop metrics took three times as long with two threads as with one (docs/performance.md).
    On one thread a product also has the same bits whatever the number of threads.

    Finding the libraries takes longer than a small product: it is done once, when this is made.
    """

    def __init__(self) -> None:
        self._pools: Any = require("threadpoolctl").ThreadpoolController()

    def __call__(self) -> AbstractContextManager[Any]:
        """One thread inside the block."""
        limit: AbstractContextManager[Any] = self._pools.limit(limits=1, user_api="blas")
        return limit

    def where_small(self, n_products: int) -> AbstractContextManager[Any]:
        """One thread inside the block if it has fewer than `LARGE` multiply-adds, else as many as there are."""
        return self() if n_products < LARGE else contextlib.nullcontext()
