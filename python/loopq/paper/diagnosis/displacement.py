"""Drift of a changed loop from the unchanged loop's final state, and the time it takes to settle (Li, App. L)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.analysis.diagnosis.rollouts import trace
from loopq.analysis.diagnosis.weights import Weights, as_stored
from loopq.errors import ConfigError, require
from loopq.models.replace import Replaced
from loopq.paper.diagnosis.spectral import on_vectors, spectral_norm
from loopq.paper.diagnosis.stepmap import StepMap, final_state, promoted
from loopq.storage.schema import Object
from loopq.systems.stepwise import SingleSteps, single_steps, steps_of

if TYPE_CHECKING:
    from loopq.analysis.diagnosis.context import Context
    from loopq.systems.base import Batch

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Displacement:
    """Displacement of each prompt after each further update.

    Parameters
    ----------
    distance : float64 ndarray of shape (n_prompts, n_more)
        ||s_t^q - s_t||_2 over all positions of the prompt.
    relative : float64 ndarray of shape (n_prompts, n_more)
        The distance divided by ||s_t||_2.
    """

    distance: Floats
    relative: Floats

    def settled_after(self, tolerance: float = 0.01) -> int | None:
        """First update from which the mean displacement stays within `tolerance` of its final value.

        None if only the last update qualifies, because it may still be moving.
        """
        mean = self.distance.mean(axis=0)
        outside = np.flatnonzero(np.abs(mean - mean[-1]) > tolerance * mean[-1])
        first = int(outside[-1]) + 2 if outside.size else 1
        return first if first < len(mean) else None

    def to_json(self) -> Object:
        """Means over prompts at every update, and the update where they settle."""
        mean = self.distance.mean(axis=0)
        return {
            "distance": mean.tolist(),
            "relative": self.relative.mean(axis=0).tolist(),
            "final": float(mean[-1]),
            "settled_after": self.settled_after() if mean[-1] > 0 else None,
            "n_prompts": int(self.distance.shape[0]),
            "n_more": int(self.distance.shape[1]),
        }


def displacement(context: Context, weights: Weights, *, n_more: int | None = None) -> Displacement:
    """Continue both loops from the unchanged loop's final state and record their distance (Li, App. L).

    Parameters
    ----------
    context : Context
        A model with a single-step function, prompts and depth. The unchanged rollout's final state is the start.
    weights : weights
        Replaced weights of the changed loop, outputs first.
    n_more : int, optional
        Further updates, n_steps when absent. Each repeats the last step. This matters for systems with step-dependent
        steps.
    """
    system, tokens, n_steps = steps_of(context.system), context.tokens, context.n_steps
    batch_size, progress = context.execution.batch_size, context.execution.progress
    if system is None:
        raise ConfigError(
            f"system {context.system.name!r} has no single-step function: it cannot be continued from a state"
        )
    more = n_steps if n_more is None else n_more
    if more < 1:
        raise ConfigError(f"n_more must be at least 1; got {more}")
    progress.start("displace", len(tokens.plan(batch_size)), "batches")
    distances, relatives = [], []
    for batch in tokens.batches(batch_size, context.execution.seed):
        distance, norm = _one_batch(system, batch, n_steps, weights, more)
        distances.append(distance)
        relatives.append(distance / np.maximum(norm, 1e-300))
        progress.advance()
    progress.stop()
    return Displacement(np.concatenate(distances), np.concatenate(relatives))


def _one_batch(
    system: SingleSteps, batch: Batch, n_steps: int, weights: Weights, more: int
) -> tuple[Floats, Floats]:
    torch = require("torch")
    start = trace(system, batch, n_steps, read=()).states[-1]
    last = max(system.n_updates(n_steps) - 1, 0)

    def onward(system: SingleSteps) -> list[Any]:
        with torch.no_grad():
            embedding = system.embed(batch)
            states = [start]
            for _ in range(more):
                states.append(system.step(states[-1], embedding, last, n_steps))
        return [s.double().flatten(1) for s in states[1:]]

    reference = onward(system)
    with Replaced(system, as_stored(system, weights, n_steps)) as changed:
        other = onward(changed)
    distance = torch.stack([(a - b).norm(dim=1) for a, b in zip(other, reference, strict=True)], 1)
    norm = torch.stack([a.norm(dim=1) for a in reference], 1)
    return distance.cpu().numpy(), norm.cpu().numpy()


def predicted(context: Context, weights: Weights) -> list[dict[str, float | None]]:
    """Predict the displacement of each prompt from one step at the unchanged loop's final state s (Li, App. H).

    Returns
    -------
    list of dict
        For each prompt, `measured` is ||s^q - s|| after m further updates, as many as the depth. `defect` is the norm
        of delta = F^q(s) - F(s). `linear` is ||sum_(j < m) J^j delta|| with J the Jacobian of F^q at s. It tends to
        ||(I - J)^-1 delta||. `modulus` is ||J||_2. `bound` is ||delta|| / (1 - modulus), or None for a modulus of 1 or
        more.
    """
    torch = require("torch")
    system, n_steps = context.system, context.n_steps
    measured = displacement(context, weights).distance[:, -1].tolist()
    last = max(single_steps(system).n_updates(n_steps) - 1, 0)
    out: list[dict[str, float | None]] = []
    for batch, distance in zip(context.tokens.batches(1, context.execution.seed), measured, strict=True):
        with promoted(system.model):
            embedding, state = final_state(system, batch, n_steps)
            step = StepMap(system, embedding, last, n_steps)
            with torch.no_grad():
                before = step(state)
            with Replaced(system, as_stored(system, weights, n_steps)) as changed:
                step = StepMap(changed, embedding, last, n_steps)
                with torch.no_grad():
                    delta = step(state) - before
                times, _ = step.products(state)
                pull = step.transposed(state)
                total, moved = delta, delta
                for _ in range(n_steps - 1):
                    moved = times(moved)
                    total = total + moved
                both = on_vectors(times, state), on_vectors(pull, state)
                modulus = spectral_norm(both[0], both[1], state.numel(), tol=1e-3)
        defect = float(delta.norm())
        bound = contraction_bound(defect, modulus) if modulus < 1 else None
        linear = float(total.norm())
        out.append(
            {"measured": distance, "defect": defect, "linear": linear, "modulus": modulus, "bound": bound}
        )
    return out


def contraction_bound(per_step: float, modulus: float) -> float:
    """Largest displacement of a contraction with a perturbation at every step (Li, App. H).

    Parameters
    ----------
    per_step : float
        Largest perturbation of one step, delta_q.
    modulus : float
        Contraction modulus L below 1.

    Returns
    -------
    float
        delta_q / (1 - L).
    """
    if not 0.0 <= modulus < 1.0:
        raise ConfigError(f"the bound holds for a contraction, 0 <= L < 1; got {modulus}")
    if per_step < 0.0:
        raise ConfigError(f"a perturbation has a norm of at least 0; got {per_step}")
    return per_step / (1.0 - modulus)
