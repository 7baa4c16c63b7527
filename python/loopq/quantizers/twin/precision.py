"""Matrix products in the full precision of their type."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def true_float32() -> Iterator[None]:
    """Prevent rounding of float32 products to tf32 or bfloat16. Restore the settings afterwards."""
    import torch  # lazy: loopq imports without torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
