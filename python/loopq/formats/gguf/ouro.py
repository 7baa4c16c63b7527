"""Ouro in llama.cpp: Nanbeige's keys, norms after attention and MLP, and no exit gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from loopq.formats.gguf.nanbeige import NanbeigeShape
from loopq.formats.gguf.shape import ARCHITECTURES, MODULES


@ARCHITECTURES.register("ouro")
class OuroShape(NanbeigeShape):
    """Layers with two more norms, run `total_ut_steps` times."""

    classes: ClassVar[tuple[str, ...]] = ("OuroForCausalLM",)
    needed: ClassVar[tuple[str, ...]] = ("rms_norm_eps", "total_ut_steps")
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NanbeigeShape.fixed,
        "layer_types": ("full_attention",),
    }
    modules: ClassVar[Mapping[str, str]] = MODULES | {
        "input_layernorm_2": "post_attention_norm", "post_attention_layernorm_2": "post_ffw_norm",
    }  # fmt: skip
    notes: ClassVar[tuple[str, ...]] = (
        "note: the exit gate is not in the file: llama.cpp runs all loops for every token",
    )

    @property
    def n_loops(self) -> int:
        """Runs of the stack."""
        return int(self.config["total_ut_steps"])

    def tensors(self, name: str) -> list[str]:
        """As in `Shape`. The exit gate has no tensor."""
        return [] if name.startswith("model.early_exit_gate.") else super().tensors(name)
