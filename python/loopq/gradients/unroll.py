"""A differentiable rollout, with other tensors instead of weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from loopq.errors import SystemContractError
from loopq.storage.model_files import is_streamed
from loopq.systems.base import Batch, LoopedSystem

if TYPE_CHECKING:
    from torch import Tensor

#: Above this, a backward pass recomputes the inside of each step.
ACTIVATION_BYTES = 1 << 30


@contextlib.contextmanager
def linked(system: LoopedSystem, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the model compute with tensors of a graph. Restore its own parameters afterwards.

    Parameters
    ----------
    system : LoopedSystem
        The model's adapter.
    weights : mapping of str to Tensor
        Parameter name to its replacement. Every module with this parameter uses it.
    """
    wanted = {id(system.weight(name)): tensor for name, tensor in weights.items()}
    changed: list[tuple[Any, dict[str, Any], list[str]]] = []
    try:
        for module in system.model.modules():
            names = [n for n, p in module._parameters.items() if p is not None and id(p) in wanted]
            if not names:
                continue
            before = dict(module._parameters)
            changed.append((module, before, names))
            for name in names:
                del module._parameters[name]
                module.__dict__[name] = wanted[id(before[name])]
        yield
    finally:
        for module, before, names in changed:
            for name in names:
                module.__dict__.pop(name, None)
            # The whole table is restored, so the order of a state dict does not change.
            module._parameters.clear()
            module._parameters.update(before)


def unroll(system: LoopedSystem, batch: Batch, n_steps: int) -> Tensor:
    """Run a rollout with gradients, step by step, or as a whole if the system has no single-step function.

    Parameters
    ----------
    system : LoopedSystem
        The model's adapter.
    batch : Batch
        Prompts. Their seeds determine the initial states.
    n_steps : int
        Depth.

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

    if not system.has_steps:
        return _whole(system, batch, n_steps)
    embedding = system.embed(batch)
    state = system.initial_state(batch, embedding)
    # Layers that are read for each visit have their own recomputation.
    recompute = not is_streamed(system.model) and _activation_bytes(system, batch, n_steps) > ACTIVATION_BYTES
    for t in range(system.n_updates(n_steps)):
        if recompute:
            state = checkpoint(system.step, state, embedding, t, n_steps, use_reentrant=False)
        else:
            state = system.step(state, embedding, t, n_steps)
    return system.predict(state, embedding)


def _whole(system: LoopedSystem, batch: Batch, n_steps: int) -> Tensor:
    with system.differentiable():
        out = system.rollout(batch, n_steps)
    if not out.requires_grad:
        raise SystemContractError(
            f"system {system.name!r}: its rollout lets no gradient through; use metric 'inputs'"
        )
    return out


def _activation_bytes(system: LoopedSystem, batch: Batch, n_steps: int) -> int:
    """Inputs and outputs of all products in float32, doubled for the activations between them."""
    # Linked weights are missing from the model's list of parameters.
    found = (getattr(module, "weight", None) for module in system.model.modules())
    width = sum(sum(w.shape) for w in found if w is not None and w.ndim == 2)
    return 8 * width * int(batch.input_ids.numel()) * n_steps
