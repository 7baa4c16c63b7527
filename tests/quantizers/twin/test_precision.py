"""The precision of float32 products while a solver runs."""

from __future__ import annotations

import torch

from loopq.quantizers.twin.precision import true_float32


def test_precision_setting_is_put_back():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with true_float32():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
