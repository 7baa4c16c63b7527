"""Systems whose rollout is a chain: embed, initial state, updates, readout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loopq.errors import SystemContractError
from loopq.systems.base import Batch, LoopedSystem

if TYPE_CHECKING:
    from torch import Tensor


class StepwiseSystem(LoopedSystem):
    """A system with a single-step function.

    The zoo's classes share one interface, so they are driven here; a subclass says how the published class of
    its kind is driven: `_rollout` by the model's own forward, `_embed`, `_step` and `_predict` by its parts.
    That both give the same output is what the conformance suite checks.
    """

    has_steps = True

    def noise(self, batch: Batch) -> Tensor | None:
        """Initial state of each prompt's own seed, or None where the state starts from the embedding."""
        return None

    def rollout(self, batch: Batch, n_steps: int) -> Tensor:
        """Run the model's own forward at a fixed depth from the initial states of the batch."""
        import torch

        depth = self.check_depth(n_steps)
        ids = self.to_device(batch.input_ids)
        with torch.set_grad_enabled(self.keeps_graph):
            if self.is_zoo:
                logits: Tensor = self.model(ids, num_steps=depth, init_state=self.noise(batch))
                return logits
            return self._rollout(ids, batch, depth)

    def embed(self, batch: Batch) -> Any:
        """What every step is given besides the state."""
        ids = self.to_device(batch.input_ids)
        return self.model.embed_inputs(ids) if self.is_zoo else self._embed(ids)

    def initial_state(self, batch: Batch, embedding: Any) -> Tensor:
        """State before step 0: the prompts' noise, or what the model starts from."""
        noise = self.noise(batch)
        if noise is not None:
            return noise
        start: Tensor = self.model.initialize_state(embedding) if self.is_zoo else self._start(embedding)
        return start

    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """State after step t of n_steps."""
        if self.is_zoo:
            after: Tensor = self.model.iterate_one_step(embedding, state, t, n_steps)
            return after
        return self._step(state, embedding, t, n_steps)

    def predict(self, state: Tensor, embedding: Any) -> Tensor:
        """Output read from a state."""
        if self.is_zoo:
            logits: Tensor = self.model.predict_from_latents(state)
            return logits
        return self._predict(state, embedding)

    def _start(self, embedding: Any) -> Tensor:
        start: Tensor = embedding
        return start

    def _rollout(self, ids: Tensor, batch: Batch, n_steps: int) -> Tensor:
        raise self._only_zoo()

    def _embed(self, ids: Tensor) -> Any:
        raise self._only_zoo()

    def _step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        raise self._only_zoo()

    def _predict(self, state: Tensor, embedding: Any) -> Tensor:
        raise self._only_zoo()

    def _only_zoo(self) -> SystemContractError:
        return SystemContractError(f"system {self.name!r}: {type(self.model).__name__} is not of the zoo")
