"""vLLM's own Dory (from 0.33 on) for packed integers.

vLLM's class passes the scheme to every layer, and its layers take packed integers. Its loader compares every tensor
with the rows of a projection first, and so refuses tensors whose first dimension counts something else. These tensors
go to vLLM's parameters unchecked. The parameters compare shapes themselves when they copy.
"""

from __future__ import annotations

from torch import Tensor
from vllm.model_executor.models.dory import DoryForCausalLM

#: Tensors of compressed-tensors and GPTQ whose first dimension is not the rows of a projection.
_NO_ROWS = ("weight_shape", "weight_zero_point", "qweight", "qzeros", "scales", "g_idx")


class PackedDory(DoryForCausalLM):
    """Dory1.0-4B in vLLM's own class, with INT4 too."""

    @staticmethod
    def _check_weight_shape(name: str, weight: Tensor, expected: tuple[int, ...]) -> None:
        if not name.endswith(_NO_ROWS):
            DoryForCausalLM._check_weight_shape(name, weight, expected)
