"""Llama in llama.cpp: a dense model, or a loop of `looped:` that is written out."""

from __future__ import annotations

from typing import ClassVar

from loopq.formats.gguf.shape import ARCHITECTURES, Shape


@ARCHITECTURES.register("llama")
class LlamaShape(Shape):
    """One run of the layers."""

    classes: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM",)
