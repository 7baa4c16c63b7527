"""Nanbeige4.2 in llama.cpp: the whole stack runs several times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from loopq.formats.gguf.shape import ARCHITECTURES, FIXED, Shape

#: Other loops than the one of the published model, and biases.
_OFF = (
    "enable_double_loop_split", "enable_hyper_connection", "enable_depth_attention", "loop_share_kv",
    "attention_bias", "mlp_bias",
)  # fmt: skip


@ARCHITECTURES.register("nanbeige")
class NanbeigeShape(Shape):
    """Llama's layers, run `num_loops` times."""

    classes: ClassVar[tuple[str, ...]] = ("NanbeigeForCausalLM",)
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {**FIXED, **dict.fromkeys(_OFF, (False,))}
    loops_key: ClassVar[str] = "num_loops"

    @property
    def n_loops(self) -> int:
        """Runs of the stack."""
        weights = self.config.get("loop_loss_weights")
        return len(weights) + 1 if weights else int(self.config.get("num_loops") or 1)

    def header(self) -> dict[str, Any]:
        """As in `Shape`, with the loop."""
        skip = bool(self.config.get("skip_loop_final_norm"))
        return super().header() | {self.loops_key: self.n_loops, "skip_loop_final_norm": skip}
