"""All stages for some rows (coordinate/settle.rs): beam search, descents, and again from the scales found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loopq._native import SETTLED, TURNS
from loopq.quantizers.twin.beam import search
from loopq.quantizers.twin.descent import Rows, change_codes, change_scales, spread
from loopq.quantizers.twin.factor import Factors
from loopq.quantizers.twin.grid import Codes, refuse_scales
from loopq.quantizers.twin.sweep import sweep


@dataclass(frozen=True)
class Stages:
    """Settings of the stages, as in the core's `GptqCdSettings`.

    Parameters
    ----------
    codes : Codes
        The grid. It includes the search for the static scales.
    n_paths : int
        Open paths of codes. One path is plain GPTQ.
    sweeps : int
        Maximum sweeps of one descent on codes. With 0 no code changes.
    rounds : int
        Maximum starts. Later starts reuse the scales found.
    refit : bool
        Whether scales are descended too.
    names : sequence of str
        A layer of each input. Messages use it.
    """

    codes: Codes
    n_paths: int
    sweeps: int
    rounds: int
    refit: bool
    names: Sequence[str]


@dataclass
class Solved:
    """Codes (L, rows, d), scales and zero points (L, rows, groups), and the losses of each row (L, rows)."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    swept: Tensor
    settled: Tensor
    moves: Tensor
    rounds: int


def settle(target: Tensor, factors: Factors, stages: Stages) -> Solved:
    """Solve rows (L, rows, d), float32."""
    codes, d = stages.codes, target.shape[2]
    scale, zero = fitted(target, factors, codes, stages.names)
    taken = start(target, factors, stages, scale, zero)
    rows = load(target, factors, codes, taken, scale, zero)
    # The loss in `rows` changes in place.
    swept = rows.loss.clone()
    solved = Solved(taken, scale, zero, swept, swept, torch.zeros_like(swept, dtype=torch.int64), 0)
    live = torch.ones_like(rows.active)
    while solved.rounds < stages.rounds and bool(live.any()):
        if solved.rounds:
            taken = start(target, factors, stages, solved.scale, solved.zero)
            rows = load(target, factors, codes, taken, solved.scale, solved.zero)
        rows.active = live
        solved.moves = solved.moves + descend(rows, factors.matrix, stages)
        less = live & (rows.loss < solved.settled)
        live = live & is_gain(rows.loss, solved.settled)
        now = codes.code_of(rows.steps, spread(codes, rows.zero, d))
        solved.codes = torch.where(less[..., None], now, solved.codes)
        solved.scale = torch.where(less[..., None], rows.scale, solved.scale)
        solved.settled = torch.where(less, rows.loss, solved.settled)
        solved.rounds += 1
    return solved


def joined(parts: Sequence[Solved]) -> Solved:
    """Join independent parts of the rows."""
    arrays = ("codes", "scale", "zero", "swept", "settled", "moves")
    whole = {name: torch.cat([getattr(part, name) for part in parts], 1) for name in arrays}
    return Solved(**whole, rounds=max(part.rounds for part in parts))


def fitted(target: Tensor, factors: Factors, codes: Codes, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Static scales and zero points (L, rows, groups). Errors are weighted by their cost in the factor's order."""
    weights = codes.groups(factors.energies()[:, None])
    scale, zero = codes.fit(codes.groups(target.double()), weights)
    refuse_scales(scale, names, codes)
    return scale, zero


def start(target: Tensor, factors: Factors, stages: Stages, scale: Tensor, zero: Tensor) -> Tensor:
    """Return codes by GPTQ with static scales."""
    ordered = factors.in_order(target)
    if stages.n_paths == 1:
        return factors.back(sweep(ordered, factors, stages.codes, (scale, zero)).codes)
    return factors.back(search(ordered, factors, stages.codes, (scale, zero), stages.n_paths))


def load(target: Tensor, factors: Factors, codes: Codes, taken: Tensor, scale: Tensor, zero: Tensor) -> Rows:
    """Return rows with the given codes, and the gradient of their loss."""
    d = target.shape[2]
    steps = codes.step(taken.float(), spread(codes, zero, d))
    values = (steps * spread(codes, scale, d)).double()
    error = values - target
    gradient = error @ factors.matrix
    loss = (error * gradient).sum(-1)
    return Rows(steps, values, gradient, scale.clone(), zero, loss, torch.ones_like(loss, dtype=torch.bool))


def descend(rows: Rows, s: Tensor, stages: Stages) -> Tensor:
    """Descend on codes and on scales in turn until neither gains. Return the moves (L, rows)."""
    moves = torch.zeros_like(rows.loss, dtype=torch.int64)
    for _ in range(TURNS):
        before = rows.loss.clone()
        moves += change_codes(rows, s, stages.codes, stages.sweeps)
        if not stages.refit:
            break
        change_scales(rows, s, stages.codes)
        rows.active = rows.active & is_gain(rows.loss, before)
        if not bool(rows.active.any()):
            break
    return moves


def is_gain(now: Tensor, before: Tensor) -> Tensor:
    """Whether the loss fell enough to continue."""
    return now < before * (1.0 - SETTLED)
