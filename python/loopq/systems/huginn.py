"""Huginn: prelude, noise-initialised state, adapter on cat(state, embedding), core blocks, coda."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loopq.systems import SYSTEMS
from loopq.systems.base import Batch, LoopedSystem, SharedParameter, declare, huginn_state_std

if TYPE_CHECKING:
    from torch import Tensor, nn

_LINEARS = (
    ("attn.Wqkv", "attention"),
    ("attn.proj", "attention"),
    ("mlp.fc", "mlp"),
    ("mlp.proj", "mlp"),
)


@SYSTEMS.register("huginn")
class Huginn(LoopedSystem):
    """Huginn-3.5B (`raven` remote code) and the zoo's small models of its kind.

    The initial state is truncated normal noise of standard deviation sqrt(2/5), cut at three standard
    deviations, handed over explicitly so that runs can be paired; the state's columns come first in the
    adapter's input. The adapter has no identity path: it is feedback-exposed.
    """

    name = "huginn"
    has_steps = True
    state_is_random = True

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Told by `transformer.adapter`, `transformer.core_block` and fused `Wqkv` projections."""
        names = dict(model.named_modules())
        return "transformer.adapter" in names and "transformer.core_block.0.attn.Wqkv" in names

    @property
    def n_steps(self) -> int:
        """`config.mean_recurrence` (the zoo: `config.n_steps`)."""
        config = self.model.config
        return int(config.n_steps if self._zoo else config.mean_recurrence)

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Adapter, then Wqkv, proj, fc and proj of every core block: 17 at Huginn's four blocks."""
        modules: list[tuple[str, dict[str, Any]]] = [
            ("transformer.adapter", {"role": "adapter", "exposed": True})
        ]
        for i in range(len(self.model.transformer.core_block)):
            for suffix, role in _LINEARS:
                modules.append((f"transformer.core_block.{i}.{suffix}", {"role": role}))
        return declare(self.model, modules, n_steps)

    def rollout(self, batch: Batch, n_steps: int) -> Tensor:
        """Call the model with explicit depth and initial states."""
        import torch

        with torch.no_grad():
            ids = self.to_device(batch.input_ids)
            if self._zoo:
                out = self.model(ids, num_steps=n_steps, init_state=self._noise(batch))
            else:
                out = self.model(ids, num_steps=n_steps, input_states=self._noise(batch), use_cache=False)
        logits: Tensor = out.logits if hasattr(out, "logits") else out
        return logits

    def embed(self, batch: Batch) -> Tensor:
        """Prelude's output, Tensor (n_prompts, n_tokens, width)."""
        out = self.model.embed_inputs(self.to_device(batch.input_ids))
        embedding: Tensor = out if self._zoo else out[0]
        return embedding

    def initial_state(self, batch: Batch, embedding: Any) -> Tensor:
        """Noise of each prompt's own seed, Tensor (n_prompts, n_tokens, width)."""
        return self._noise(batch)

    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """One pass through adapter and core blocks."""
        out = self.model.iterate_one_step(embedding, state)
        after: Tensor = out if self._zoo else out[0]
        return after

    def predict(self, state: Tensor, embedding: Any) -> Tensor:
        """Coda and head."""
        out = self.model.predict_from_latents(state)
        logits: Tensor = out.logits if hasattr(out, "logits") else out
        return logits

    @property
    def _zoo(self) -> bool:
        return str(getattr(self.model.config, "model_type", "")).startswith("loopq-zoo")

    def _noise(self, batch: Batch) -> Tensor:
        width = int(self.model.transformer.adapter.weight.shape[0])
        noise = batch.noise(batch.input_ids.shape[1], width, std=huginn_state_std(width), cut=3.0)
        return self.to_device(noise, dtype=True)
