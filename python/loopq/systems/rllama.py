"""R-Llama: a Llama made recurrent; Huginn's skeleton around plain pre-norm blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loopq.systems import SYSTEMS
from loopq.systems.raven import Raven

if TYPE_CHECKING:
    from torch import Tensor, nn


@SYSTEMS.register("rllama")
class RLlama(Raven):
    """R-Llama-1.4B (`raven` remote code for Llama).

    Blocks are pre-norm with a pure identity path, the noise state is small beside the embedding (standard
    deviation sqrt(2/(5 d))), and the raw state goes to the coda. The adapter is feedback-exposed.
    """

    name = "rllama"
    summary = "small noise state; s = core(adapter([s, e])) with pre-norm residual blocks"
    checkpoints = (("R-Llama-1.4B", 25),)
    code = "checkpoint"

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Told by `transformer.adapter` and core blocks with two norms each."""
        names = dict(model.named_modules())
        return (
            "transformer.adapter" in names
            and "transformer.core_block.0.attn.Wqkv" in names
            and "transformer.core_block.0.norm_4" not in names
        )

    def _rotary(self, state: Tensor) -> Any:
        import torch

        positions = torch.arange(state.shape[1], device=state.device).unsqueeze(0)
        return self.model.rotary_emb(state, positions)

    def _leave(self, state: Tensor) -> Tensor:
        return state
