"""R-Llama and similar models: a pre-trained model made recurrent, with its blocks in Huginn's skeleton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from loopq.systems import SYSTEMS
from loopq.systems.base import Published
from loopq.systems.blocks import angles_of, has_plain_attention
from loopq.systems.fixed import Positioned
from loopq.systems.raven import Raven
from loopq.systems.views import view


@SYSTEMS.register("rllama")
class RLlama(Raven):
    """R-Llama-1.4B, Recurrent-TinyLlama and Recurrent-OLMo-2 (`raven` remote code for Llama and OLMo).

    Blocks have a pure identity path (norms before the branches, or behind them in OLMo). The noise state is small
    relative to the embedding (standard deviation sqrt(2/(5 d))). The raw state enters the coda. The adapter is
    feedback-exposed.
    """

    summary = "small noise state; s = core(adapter([s, e])) with residual blocks of Llama or OLMo"
    published = Published(
        {"R-Llama-1.4B": 25, "Recurrent-TinyLlama": 33, "Recurrent-OLMo-2": 25},
        code="checkpoint",
        exposed=("adapter",),
    )

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Recognised by `transformer.adapter` and core blocks with two norms each."""
        names = dict(model.named_modules())
        return (
            "transformer.adapter" in names
            and "transformer.core_block.0.attn.Wqkv" in names
            and "transformer.core_block.0.norm_4" not in names
        )

    def caches(self) -> bool:
        """Whether no layer has a window, and positions do not depend on the text's length."""
        return has_plain_attention(self.model.config)

    def _placed(self, positions: Tensor) -> Any:
        rotary = self.model.rotary_emb
        return view(self.model, (rotary, Positioned(rotary, positions)))

    def _rotary(self, state: Tensor) -> Any:
        positions = torch.arange(state.shape[1], device=state.device).unsqueeze(0)
        return self.model.rotary_emb(state, positions)

    def _angles(self, n_positions: int) -> Tensor:
        return angles_of(self.model.rotary_emb, n_positions)

    def _norms_after_loop(self) -> list[tuple[str, Any]]:
        return []

    def _leave(self, state: Tensor) -> Tensor:
        return state
