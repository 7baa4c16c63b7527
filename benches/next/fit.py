"""How corrections are found: in closed form step after step, or by gradient on the divergence through the loop."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benches.next.corrections import STATE, Corrections, LowRank, Place, blank
from loopq.calibrate.data import TokenSet
from loopq.gradients.unroll import linked, unroll
from loopq.systems.base import LoopedSystem
from loopq.systems.replace import replaced

Matrix = NDArray[np.float64]
Weights = Mapping[str, NDArray[np.float32]]


def regressed(system: LoopedSystem, weights: Weights, tokens: TokenSet, gains: bool) -> Corrections:
    """Gain and bias of the state in closed form, step after step, each on what the steps before leave.

    Notes
    -----
    With s the state of the full-precision rollout after step t and s^ that of the quantized one, corrected at all steps
    before, per channel: 1 + g = cov(s, s^) / var(s^), b = E s - (1 + g) E s^; without gains g = 0.
    """
    found = blank(system, tokens, [STATE], shared=False)
    place, depth = found.places[STATE], system.n_steps
    assert isinstance(place, Place)
    batches = list(tokens.batches(8, 0))
    with torch.no_grad():
        embedded = [system.embed(b) for b in batches]
        own = [system.initial_state(b, e) for b, e in zip(batches, embedded, strict=True)]
        with replaced(system, weights):
            theirs_embedded = [system.embed(b) for b in batches]
            theirs = [system.initial_state(b, e) for b, e in zip(batches, theirs_embedded, strict=True)]
        for t in range(system.n_updates(depth)):
            own = [system.step(s, e, t, depth) for s, e in zip(own, embedded, strict=True)]
            with replaced(system, weights):
                theirs = [system.step(s, e, t, depth) for s, e in zip(theirs, theirs_embedded, strict=True)]
            a, b = (torch.cat([s.flatten(0, -2) for s in side]).double() for side in (own, theirs))
            mean_a, mean_b = a.mean(0), b.mean(0)
            if gains:
                slope = ((a - mean_a) * (b - mean_b)).mean(0) / (b - mean_b).square().mean(0).clamp(min=1e-12)
                place.gain[t] = (slope - 1).float()
            moved = mean_a - (1 + place.gain[t].double()) * mean_b
            place.bias[t] = moved.float() / place.size[t]
            theirs = [place.at(s, t) for s in theirs]
    return found


def trained(
    system: LoopedSystem,
    weights: Weights,
    prompts: tuple[TokenSet, TokenSet],
    start: Corrections,
    *,
    n_updates: int = 120,
    rate: float = 3e-3,
) -> Corrections:
    """Corrections by Adam on the divergence through the unrolled loop; those that are best on held-out prompts."""
    tokens, held_out = prompts
    fixed = {n: torch.from_numpy(np.ascontiguousarray(w)) for n, w in weights.items()}
    moving = [x for place in start.places.values() for x in place.moving()]
    optimizer = torch.optim.Adam(moving, lr=rate, betas=(0.9, 0.99))
    order = np.random.default_rng(0)
    best = (_held_out(system, fixed, held_out, start), start.stored())
    for number in range(n_updates):
        optimizer.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * number / n_updates))
        chosen = order.choice(len(tokens.sequences), min(8, len(tokens.sequences)), replace=False)
        part = TokenSet(tuple(tokens.sequences[i] for i in chosen), tokens.source, tokens.packing)
        optimizer.zero_grad(set_to_none=True)
        for batch in part.batches(8, 1 + number):
            with torch.no_grad():
                reference = system.rollout(batch, system.n_steps)
            with start.applied(system), linked(system, fixed):
                out = unroll(system, batch, system.n_steps)
            divergence(reference, out, system.output).backward()
        optimizer.step()
        if (number + 1) % 20 == 0:
            stored = start.stored()
            value = _held_out(system, fixed, held_out, stored)
            if value < best[0]:
                best = (value, stored)
    return best[1]


def _held_out(
    system: LoopedSystem, weights: Mapping[str, Tensor], tokens: TokenSet, corrections: Corrections
) -> float:
    total = 0.0
    with torch.no_grad():
        for batch in tokens.batches(8, 0):
            reference = system.rollout(batch, system.n_steps)
            with corrections.applied(system), linked(system, weights):
                out = unroll(system, batch, system.n_steps)
            total += float(divergence(reference, out, system.output)) * len(batch.prompts)
    return total / len(tokens.sequences)


def divergence(reference: Tensor, out: Tensor, output: str) -> Tensor:
    """KL(reference || out) in nats, mean over positions; for hidden states the squared relative error."""
    if output == "logits":
        log_p, log_q = reference.log_softmax(-1), out.log_softmax(-1)
        kl: Tensor = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        return kl
    error: Tensor = (out - reference).square().sum() / reference.square().sum()
    return error


def low_rank(name: str, error: Matrix, sides: tuple[Matrix, Matrix], rank: int, steps: int) -> Corrections:
    """What of an error a product of low rank takes away best in the loop metric: a_t = 1, U V^T from a singular value
    decomposition, A^-1/2 [A^1/2 D S^1/2]_r S^-1/2.
    """
    roots = [np.linalg.cholesky(side) for side in sides]
    u, s, vt = np.linalg.svd(roots[0].T @ error @ roots[1], full_matrices=False)
    size = np.sqrt(s[:rank])
    left = np.linalg.solve(roots[0].T, u[:, :rank] * size).T
    right = np.linalg.solve(roots[1].T, vt[:rank].T * size).T
    left, right = (torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)) for x in (-left, right))
    return Corrections({name: LowRank(left, right, torch.ones(steps, rank))})
