"""How much a step of a loop enlarges a small change of its state, as a term of a training loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: Share of the positions that are changed at once. Changed positions attend to each other, so they are few.
SHARE = 1 / 16
#: Size of a change relative to the state, and steps that turn it towards the direction that grows most.
SIZE, N_TURNS = 1e-3, 5
#: Steps that the gradient of the text's loss passes, as in Huginn's training.
N_LAST = 8
#: Weight of the penalty beside the text's loss in nats.
WEIGHT = 0.1


def growth(step: Callable[[Tensor], Tensor], state: Tensor, seed: int) -> Tensor:
    """Return the growth (n,) of a small change of `state` (batch, seq, d) by one step, at n random positions.

    Notes
    -----
    The state of a position depends on itself and on earlier positions, so the eigenvalues of a step's Jacobian are
    those of the positions' own blocks. A few steps of the power method turn the change of a position towards the
    direction that grows most, and the growth by the next step, which has a gradient, is near the block's radius.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand((*state.shape[:2], 1), generator=generator) < SHARE
    change = torch.randn(state.shape, generator=generator)
    size = SIZE * state.norm(dim=-1, keepdim=True)

    def scaled(change: Tensor) -> Tensor:
        return chosen * change * (size / change.norm(dim=-1, keepdim=True).clamp_min(1e-30))

    with torch.no_grad():
        end = step(state)
        for _ in range(N_TURNS):
            change = step(state + scaled(change)) - end
    moved = step(state + scaled(change)) - step(state)
    factors: Tensor = (moved.norm(dim=-1, keepdim=True) / size)[chosen]
    return factors


def penalty(step: Callable[[Tensor], Tensor], state: Tensor, seed: int, target: float) -> Tensor:
    """Return the mean square of log(growth / target) over positions: 0 where each change grows by `target`."""
    return (growth(step, state, seed).clamp_min(1e-6) / target).log().square().mean()
