"""A differentiable rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopq.errors import SystemContractError
from loopq.storage.model_files import is_streamed
from loopq.systems.base import Batch, LoopedSystem, differentiable
from loopq.systems.stepwise import steps_of

if TYPE_CHECKING:
    from torch import Tensor

#: Above this, a backward pass recomputes the inside of each step.
ACTIVATION_BYTES = 1 << 30


def unroll(system: LoopedSystem, batch: Batch, n_steps: int) -> Tensor:
    """Run a rollout with gradients, step by step, or as a whole without a single-step function of fixed-size states.

    Parameters
    ----------
    batch : Batch
        Prompts. Their seeds determine the initial states.

    Returns
    -------
    Tensor
        Result of `system.rollout`, with a graph. If the activations of all steps exceed `ACTIVATION_BYTES`, those
        inside a step are recomputed in the backward pass. Memory then holds one state per step instead of one step's
        activations times the depth.

    Raises
    ------
    SystemContractError
        The system has no single-step function, and its rollout passes no gradient.
    """
    from torch.utils.checkpoint import checkpoint  # lazy: loopq imports without torch

    # A step that repeats earlier passes would give their rows a gradient twice.
    steps = steps_of(system)
    if steps is None or steps.grows:
        return _whole(system, batch, n_steps)
    embedding = steps.embed(batch)
    state = steps.initial_state(batch, embedding)
    # Layers that are read for each visit have their own recomputation.
    recompute = not is_streamed(system.model) and _activation_bytes(system, batch, n_steps) > ACTIVATION_BYTES
    for t in range(steps.n_updates(n_steps)):
        if recompute:
            state = checkpoint(steps.step, state, embedding, t, n_steps, use_reentrant=False)
        else:
            state = steps.step(state, embedding, t, n_steps)
    return steps.predict(state, embedding)


def _whole(system: LoopedSystem, batch: Batch, n_steps: int) -> Tensor:
    with differentiable(system):
        out = system.rollout(batch, n_steps)
    if not out.requires_grad:
        raise SystemContractError(
            f"system {system.name!r}: its rollout lets no gradient through; use metric 'inputs'"
        )
    return out


def _activation_bytes(system: LoopedSystem, batch: Batch, n_steps: int) -> int:
    """Inputs and outputs of all products in float32, doubled for the activations between them."""
    weights = (getattr(module, "weight", None) for module in system.model.modules())
    width = sum(sum(w.shape) for w in weights if w is not None and w.ndim == 2)
    return 8 * width * int(batch.input_ids.numel()) * n_steps
