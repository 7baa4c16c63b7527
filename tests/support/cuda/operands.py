"""Operands of the product."""

from __future__ import annotations

import torch

from loopq.runtime.cuda.layout import pack_w4
from tests.support.cuda.layers import layer_parts


def operands(group_size: int = 64, tokens: int = 3, dtype: torch.dtype = torch.bfloat16) -> dict[str, object]:
    codes, scales = layer_parts(group_size=group_size)
    return {
        "x": torch.randn(tokens, 160, generator=torch.Generator().manual_seed(1)).to(dtype),
        "qweight": torch.from_numpy(pack_w4(codes)),
        "scales": torch.from_numpy(scales.T.copy()),
        "bias": None,
        "addend": None,
        "in_features": 160,
        "group_size": group_size,
    }
