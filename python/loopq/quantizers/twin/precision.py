"""Products that are not rounded more than their type says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def true_float32() -> Iterator[None]:
    """Keep float32 products from being rounded to tf32 or bfloat16 first, and put the settings back."""
    import torch  # lazy: loopq imports without torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
