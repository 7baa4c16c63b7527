"""Systems with a rollout of separate parts: embedding, initial state, updates and readout."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from loopq.systems.base import Batch, LoopedSystem

if TYPE_CHECKING:
    from torch import Tensor


class StepwiseSystem(LoopedSystem):
    """A system with a single-step function.

    A subclass drives the published class in two ways. `_rollout` uses the model's forward. `_embed`, `step` and
    `predict` use its parts. The conformance suite checks that both give the same output.
    """

    has_steps = True

    def noise(self, batch: Batch) -> Tensor | None:
        """Initial state from each prompt's seed, or None where the state starts from the embedding."""
        return None

    def rollout(self, batch: Batch, n_steps: int) -> Tensor:
        """Run the model's forward at a fixed depth from the initial states of the batch."""
        import torch  # lazy: loopq imports without torch

        depth = self.check_depth(n_steps)
        ids = self.to_device(batch.input_ids)
        with torch.set_grad_enabled(self.keeps_graph):
            return self._rollout(ids, batch, depth)

    def embed(self, batch: Batch) -> Any:
        """Second input of every step besides the state."""
        return self._embed(self.to_device(batch.input_ids))

    def initial_state(self, batch: Batch, embedding: Any) -> Tensor:
        """State before step 0: the prompts' noise, or the model's start."""
        noise = self.noise(batch)
        return self._start(embedding) if noise is None else noise

    @abstractmethod
    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """State after step t of n_steps."""

    @abstractmethod
    def predict(self, state: Tensor, embedding: Any) -> Tensor:
        """Output read from a state."""

    @abstractmethod
    def _rollout(self, ids: Tensor, batch: Batch, n_steps: int) -> Tensor:
        """Output of the model's own forward."""

    @abstractmethod
    def _embed(self, ids: Tensor) -> Any:
        """Second input of every step, from ids on the model's device."""

    def _start(self, embedding: Any) -> Tensor:
        """Start state of a model without drawn states."""
        start: Tensor = embedding
        return start
