"""HRM-Text: a low stack that runs several times for each run of a high stack."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from loopq.layers.shared import SharedParameter
from loopq.systems import SYSTEMS
from loopq.systems.base import Batch, Published
from loopq.systems.blocks import angles_of, llama_block
from loopq.systems.declare import declare
from loopq.systems.outputs import cache_name, cached, logits_of, past
from loopq.systems.program import Program
from loopq.systems.stepwise import SingleSteps
from loopq.systems.views import changed, view

_LINEARS = (
    ("self_attn.q_proj", "attention"),
    ("self_attn.k_proj", "attention"),
    ("self_attn.v_proj", "attention"),
    ("self_attn.gate_proj", "attention"),
    ("self_attn.o_proj", "attention"),
    ("mlp.gate_proj", "mlp"),
    ("mlp.up_proj", "mlp"),
    ("mlp.down_proj", "mlp"),
)


@SYSTEMS.register("hrm_text")
class HrmText(SingleSteps):
    """transformers' HRM-Text.

    A step is one high cycle: `L_cycles` runs of the low stack on z_L + z_H, then one of the high stack. The low
    stack's weights are therefore called `L_cycles` times as often as the high stack's. The state is cat(z_H, z_L)
    along the width.
    """

    summary = "L_cycles x z_L = L(z_L + z_H), then z_H = H(z_H + z_L); counts differ by stack"
    published = Published({"HRM-Text-1B": 256}, transformers=">=5.9,<6")

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Recognised by `model.L_module` and `model.H_module`."""
        names = dict(model.named_modules())
        return "model.L_module.layers.0" in names and "model.H_module.layers.0" in names

    @property
    def n_steps(self) -> int:
        """`config.H_cycles`."""
        return int(self.model.config.H_cycles)

    @property
    def _low_cycles(self) -> int:
        return int(self.model.config.L_cycles)

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Linears of the low stack, called n_steps * L_cycles times, and of the high stack, n_steps times."""
        inner = self.model.model
        modules: list[tuple[str, dict[str, Any]]] = []
        for stack, calls in (("L_module", n_steps * self._low_cycles), ("H_module", n_steps)):
            for i, layer in enumerate(getattr(inner, stack).layers):
                present = dict(layer.named_modules())
                modules += [
                    (f"model.{stack}.layers.{i}.{suffix}", {"role": role, "invocations": calls})
                    for suffix, role in _LINEARS
                    if suffix in present
                ]
        return declare(self.model, modules, n_steps)

    def rollout(self, batch: Batch, n_steps: int) -> Tensor:
        """Run the model's own forward with `n_steps` high cycles."""
        depth = self.check_depth(n_steps)
        model = self._with(H_cycles=depth)
        with torch.set_grad_enabled(self.keeps_graph):
            return logits_of(model(input_ids=self.to_device(batch.input_ids), use_cache=False))

    def _with(self, **values: Any) -> Any:
        """The model with other settings."""
        return view(self.model, (self.model.config, changed(self.model.config, **values)))

    def extend(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any]:
        """Continue with the model's cache: a slot for each layer of each run of a stack."""
        slots = self.model.config.num_layers_per_stack * n_steps * (self._low_cycles + 1)
        ids = self.to_device(batch.input_ids[:, n_seen:])
        model = self._with(H_cycles=n_steps, num_hidden_layers=slots)
        return cached(model(input_ids=ids, **past(self.model, cache)))

    def program(self, n_steps: int) -> Program | None:
        """Both stacks in order, each with its norm. z_H is kept under 0, z_L under 1."""
        inner, config = self.model.model, self.model.config
        stacks = []
        for stack in (inner.L_module, inner.H_module):
            blocks = [llama_block(layer, config) for layer in stack.layers]
            if not all(blocks):
                return None
            stacks.append([*(("block", block) for block in blocks), ("norm", stack.final_norm)])
        low, high = stacks
        cycle = [
            *[("add", 0), *low] * self._low_cycles,
            ("keep", 1),
            ("add", 0),
            *high,
            ("keep", 0),
            ("take", 1),
        ]
        order = [("keep", 0), ("start", None), *cycle * n_steps, ("take", 0)]

        def start(batch: Batch, n_seen: int) -> Tensor:
            first: Tensor = inner.z_L_init
            return first.expand(1, batch.input_ids.shape[1] - n_seen, -1)

        return Program(
            lambda ids: inner.embed_tokens(ids) * inner.embedding_scale,
            order, self.model.lm_head, lambda n: angles_of(inner.rotary_emb, n), start,
        )  # fmt: skip

    def embed(self, batch: Batch) -> Tensor:
        """Scaled token embeddings. They start z_H and are not injected again."""
        inner = self.model.model
        embedding: Tensor = inner.embed_tokens(self.to_device(batch.input_ids)) * inner.embedding_scale
        return embedding

    def initial_state(self, batch: Batch, embedding: Any) -> Tensor:
        """Return cat(embeddings, z_L_init) of shape (n_prompts, n_tokens, 2 * width)."""
        low = self.model.model.z_L_init.to(embedding.dtype).expand_as(embedding)
        return torch.cat((embedding, low), -1)

    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """One high cycle."""
        from transformers.masking_utils import (
            create_causal_mask,  # lazy: only its models need transformers
        )

        inner = self.model.model
        high, low = state.chunk(2, -1)
        positions = torch.arange(state.shape[1], device=state.device).unsqueeze(0)
        given = {
            "attention_mask": create_causal_mask(
                config=inner.config,
                inputs_embeds=high,
                attention_mask=None,
                position_ids=positions,
                **{str(cache_name(create_causal_mask)): None},
            ),
            "position_embeddings": inner.rotary_emb(high, positions),
            "position_ids": positions,
        }
        for _ in range(self._low_cycles):
            low = inner.L_module(low + high, **given)
        high = inner.H_module(high + low, **given)
        return torch.cat((high, low), -1)

    def predict(self, state: Tensor, embedding: Any) -> Tensor:
        """Head on z_H."""
        logits: Tensor = self.model.lm_head(state.chunk(2, -1)[0])
        return logits
