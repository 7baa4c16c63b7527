"""Systems with a rollout of separate parts: embedding, initial state, updates and readout."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from loopq.errors import SystemContractError
from loopq.systems.base import Batch, LoopedSystem

if TYPE_CHECKING:
    from torch import Tensor


class SingleSteps(LoopedSystem):
    """A system with a single-step function. Diagnoses that intervene in the loop need it.

    Parameters
    ----------
    model : nn.Module
        The model, in eval mode.

    Attributes
    ----------
    has_steps : bool
        Whether this model has it. Some of a kind may not.
    grows : bool
        Whether a step appends to the state. It then repeats earlier passes and has no square Jacobian.
    """

    has_steps: bool = True
    grows: bool = False

    def n_updates(self, n_steps: int) -> int:
        """Number of `step` calls before `predict` in a rollout of depth `n_steps`.

        It is `n_steps`, unless the readout is itself the last pass through the loop's weights.
        """
        return n_steps

    @abstractmethod
    def embed(self, batch: Batch) -> Any:
        """Second input of every step besides the state (the prelude's output), or None."""

    @abstractmethod
    def initial_state(self, batch: Batch, embedding: Any) -> Tensor:
        """State before step 0."""

    @abstractmethod
    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """State after step t of n_steps."""

    @abstractmethod
    def predict(self, state: Tensor, embedding: Any) -> Tensor:
        """Output read from a state."""


def steps_of(system: LoopedSystem) -> SingleSteps | None:
    """Return the system if it can run step by step. None if it cannot."""
    return system if isinstance(system, SingleSteps) and system.has_steps else None


def single_steps(system: LoopedSystem) -> SingleSteps:
    """Return the system as one that can run step by step.

    Raises
    ------
    SystemContractError
        If it cannot.
    """
    steps = steps_of(system)
    if steps is None:
        raise SystemContractError(f"system {system.name!r} has no single-step function")
    return steps


class StepwiseSystem(SingleSteps):
    """A system with a single-step function and a forward of its own.

    A subclass drives the published class in two ways. `_rollout` uses the model's forward. `_embed`, `step` and
    `predict` use its parts. The conformance suite checks that both give the same output.

    Parameters
    ----------
    model : nn.Module
        The model, in eval mode.
    """

    def noise(self, batch: Batch, first: int = 0) -> Tensor | None:
        """Initial states of the tokens from `first` on, or None where the state starts from the embedding."""
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
    def _rollout(self, ids: Tensor, batch: Batch, n_steps: int) -> Tensor:
        """Output of the model's own forward."""

    @abstractmethod
    def _embed(self, ids: Tensor) -> Any:
        """Second input of every step, from ids on the model's device."""

    def _start(self, embedding: Any) -> Tensor:
        """Start state of a model without drawn states."""
        start: Tensor = embedding
        return start
