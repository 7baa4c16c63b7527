"""Llama in llama.cpp: a dense model, or a loop of `looped:`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from loopq.formats.gguf.shape import ARCHITECTURES, FIXED, Shape
from loopq.layers.loop_spec import BASE, LOOP, LOOPED_TYPE


@ARCHITECTURES.register("llama")
class LlamaShape(Shape):
    """One run of the layers. A loop of some layers is written out; of all layers, Nanbeige's architecture runs it."""

    classes: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM",)
    # transformers takes the class by the type, whatever "architectures" says.
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **FIXED,
        "model_type": ("llama", LOOPED_TYPE),
        BASE: ("llama",),
    }

    @classmethod
    def fitting(cls, config: Mapping[str, Any]) -> Shape:
        """As in `Shape`. Nanbeige has no biases, and no norm between loops if its header says so."""
        loop = config.get(LOOP)
        plain = not (config.get("attention_bias") or config.get("mlp_bias"))
        if not plain or not isinstance(loop, list) or loop[:2] != [0, config.get("num_hidden_layers")]:
            return cls(config)
        rest = {key: value for key, value in config.items() if key != LOOP}
        return ARCHITECTURES.get("nanbeige")({**rest, "num_loops": loop[2], "skip_loop_final_norm": True})
