"""Nanbeige4.2 in llama.cpp: the whole stack runs several times."""

from __future__ import annotations

from typing import Any, ClassVar

from loopq.formats.gguf.shape import ARCHITECTURES, Shape


@ARCHITECTURES.register("nanbeige")
class NanbeigeShape(Shape):
    """Llama's layers, run `num_loops` times."""

    classes: ClassVar[tuple[str, ...]] = ("NanbeigeForCausalLM",)
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
