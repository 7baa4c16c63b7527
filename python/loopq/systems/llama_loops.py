"""Looped stacks of Llama-style layers with a norm between loops, shared by Ouro and Nanbeige."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from loopq.layers.shared import SharedParameter
from loopq.systems.blocks import angles_of, has_plain_attention, llama_block
from loopq.systems.declare import declare
from loopq.systems.fixed import FixedCached, Positioned
from loopq.systems.program import Program

_LINEARS = (
    ("self_attn.q_proj", "attention"),
    ("self_attn.k_proj", "attention"),
    ("self_attn.v_proj", "attention"),
    ("self_attn.o_proj", "attention"),
    ("mlp.gate_proj", "mlp"),
    ("mlp.up_proj", "mlp"),
    ("mlp.down_proj", "mlp"),
)


def llama_linears(model: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """Names and roles of the seven linears of every layer of `model.layers`, in the form for `declare`."""
    n_layers = len(model.get_submodule("model.layers")._modules)
    return [
        (f"model.layers.{i}.{suffix}", {"role": role}) for i in range(n_layers) for suffix, role in _LINEARS
    ]


class LlamaLoops(FixedCached):
    """Base of adapters with the hidden state as state and the whole stack as step."""

    def layers(self, n_steps: int, *others: tuple[str, dict[str, Any]]) -> tuple[SharedParameter, ...]:
        """Seven linears of every layer, then `others`."""
        return declare(self.model, [*llama_linears(self.model), *others], n_steps)

    def caches(self) -> bool:
        """Whether no layer has a window, and positions do not depend on the text's length."""
        return has_plain_attention(self.model.config)

    def _placed(self, positions: Tensor) -> list[tuple[nn.Module, nn.Module]]:
        """The model's rotary embeddings, and what gives the angles of these positions in their place."""
        named = [m for name, m in self.model.named_modules() if name.endswith("rotary_emb")]
        return [(rotary, Positioned(rotary, positions)) for rotary in named]

    def program(self, n_steps: int) -> Program | None:
        """All layers, then the norm, repeated for every loop."""
        inner = self.model.model
        blocks = [llama_block(layer, self.model.config) for layer in inner.layers]
        if not all(blocks):
            return None
        order = [*(("block", block) for block in blocks), ("norm", inner.norm)] * n_steps
        return Program(
            inner.embed_tokens, order, self.model.lm_head, lambda n: angles_of(inner.rotary_emb, n)
        )

    def _embed(self, ids: Tensor) -> Tensor:
        embedding: Tensor = self.model.model.embed_tokens(ids)
        return embedding

    def predict(self, state: Tensor, embedding: Any) -> Tensor:
        """The head."""
        logits: Tensor = self.model.lm_head(state)
        return logits
