"""Rollouts of one batch under different weights, and the distances between their outputs and states."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.analysis.diagnosis.weights import Weights, as_stored
from loopq.errors import ConfigError, NonFiniteError, require
from loopq.models.replace import Replaced
from loopq.storage.schema import Object
from loopq.systems.stepwise import steps_of

if TYPE_CHECKING:
    from torch import Tensor

    from loopq.analysis.diagnosis.context import Context
    from loopq.systems.base import Batch, LoopedSystem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RolloutTrace:
    """States and outputs of one rollout.

    Parameters
    ----------
    states : list of Tensor
        State before step 0 and after every update (`SingleSteps.n_updates`). Empty without a step function.
    outputs : dict of int to Tensor, float32 of shape (n_prompts, n_tokens, n_outputs)
        Output by the number of completed steps. If the last step is the readout, it reads the state before it.
    """

    states: list[Tensor]
    outputs: dict[int, Tensor]


def trace(
    system: LoopedSystem, batch: Batch, n_steps: int, read: Sequence[int] | None = None
) -> RolloutTrace:
    """Run one rollout and record its states, and its outputs after the step counts in `read`.

    These are 1 to n_steps, by default all. Without a step function only the final output is recorded.
    """
    torch = require("torch")
    with torch.no_grad():
        steps = steps_of(system)
        if steps is None:
            return RolloutTrace([], {n_steps: system.rollout(batch, n_steps).float()})
        embedding = steps.embed(batch)
        states = [steps.initial_state(batch, embedding)]
        for t in range(steps.n_updates(n_steps)):
            states.append(steps.step(states[-1], embedding, t, n_steps))
        wanted = range(1, n_steps + 1) if read is None else sorted(set(read))
        outputs = {n: steps.predict(states[steps.n_updates(n)], embedding).float() for n in wanted}
    return RolloutTrace(states, outputs)


def relative_error(value: Tensor, reference: Tensor) -> Floats:
    """||value - reference|| / ||reference|| of each prompt, shape (n_prompts,)."""
    difference = (value.double() - reference.double()).flatten(1).norm(dim=1)
    scale = reference.double().flatten(1).norm(dim=1).clamp_min(1e-300)
    errors: Floats = (difference / scale).cpu().numpy()
    return errors


def kl_divergence(logits: Tensor, reference: Tensor) -> Floats:
    """KL(reference || other) in nats, mean over positions of each prompt, shape (n_prompts,)."""
    p, q = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    # Rounding can give a sum of about -1e-17, but a divergence is not negative.
    kl: Floats = ((p.exp() * (p - q)).sum(-1)).clamp_min(0.0).mean(dim=1).cpu().numpy()
    return kl


@dataclass(frozen=True)
class Comparison:
    """One set of weights compared with the reference, prompt by prompt.

    Parameters
    ----------
    steps : tuple of int
        Step counts with an output.
    positions : int64 ndarray of shape (n_prompts,)
        Compared token positions of each prompt.
    matches : int64 ndarray of shape (n_prompts, n_reads), or None
        Positions with the reference's top-1 prediction. None where the output is not logits.
    kl : float64 ndarray of shape (n_prompts, n_reads), or None
        KL(reference || other) in nats. Mean over positions.
    output_error : float64 ndarray of shape (n_prompts, n_reads)
        Relative l2 error of the output.
    state_error : float64 ndarray of shape (n_prompts, n_updates), or None
        Relative l2 error of the state after every update. None without a step function.
    """

    steps: tuple[int, ...]
    positions: Ints
    matches: Ints | None
    kl: Floats | None
    output_error: Floats
    state_error: Floats | None

    @property
    def agreement(self) -> Floats:
        """Share of agreeing positions, shape (n_prompts, n_reads)."""
        if self.matches is None:
            raise ConfigError("the system's output is hidden states: there is no top-1 prediction to compare")
        return self.matches / self.positions[:, None]

    def curve(self, name: str) -> Floats:
        """Mean over prompts of "agreement", "kl" or an error, with equal weight per prompt. Shape (n,)."""
        values = getattr(self, name)
        mean: Floats = values.mean(axis=0)
        return mean

    def to_json(self) -> Object:
        """Means over prompts at every step, the pooled agreement, and each prompt's values at the `last` step."""
        out: Object = {
            "steps": list(self.steps),
            "last": {"output_error": self.output_error[:, -1].tolist()},
            "n_prompts": len(self.positions),
            "n_positions": int(self.positions.sum()),
            "output_error": self.curve("output_error").tolist(),
            "state_error": None if self.state_error is None else self.curve("state_error").tolist(),
            "agreement": None,
            "agreement_pooled": None,
            "kl": None,
        }
        if self.matches is not None and self.kl is not None:
            out |= {
                "agreement": self.curve("agreement").tolist(),
                "agreement_pooled": (self.matches.sum(axis=0) / self.positions.sum()).tolist(),
                "kl": self.curve("kl").tolist(),
                "last": out["last"]
                | {"agreement": self.agreement[:, -1].tolist(), "kl": self.kl[:, -1].tolist()},
            }
        return out


def compare_traces(
    run: RolloutTrace, reference: RolloutTrace, logits: bool, scored_from: int = 0
) -> Comparison:
    """Compare two rollouts of one batch by prompt. Logits are compared from one position on.

    Raises
    ------
    NonFiniteError
        If an output of `run` is NaN or infinite.
    """
    steps = tuple(sorted(reference.outputs))
    scored = slice(scored_from if logits else 0, None)
    pairs = [(run.outputs[n][:, scored], reference.outputs[n][:, scored]) for n in steps]
    for n, (ours, _) in zip(steps, pairs, strict=True):
        if not bool(ours.isfinite().all()):
            raise NonFiniteError(
                f"the output after {n} steps is not finite: the changed model overflows; use more bits or smaller "
                "groups"
            )
    first = pairs[0][1]
    matches = kl = None
    if logits:
        matches = np.stack([(a.argmax(-1) == b.argmax(-1)).sum(1).cpu().numpy() for a, b in pairs], axis=1)
        kl = np.stack([kl_divergence(a, b) for a, b in pairs], axis=1)
    states = None
    if len(reference.states) > 1:
        zipped = list(zip(run.states[1:], reference.states[1:], strict=True))
        states = np.stack([relative_error(a, b) for a, b in zipped], axis=1)
    return Comparison(
        steps,
        np.full(first.shape[0], first.shape[1], dtype=np.int64),
        matches,
        kl,
        np.stack([relative_error(a, b) for a, b in pairs], axis=1),
        states,
    )


def gather(parts: Sequence[Comparison]) -> Comparison:
    """Concatenate the prompts of several batches."""

    def join(name: str) -> Any:
        values = [getattr(p, name) for p in parts]
        return None if values[0] is None else np.concatenate(values)

    fields = ("positions", "matches", "kl", "output_error", "state_error")
    return Comparison(parts[0].steps, *(join(name) for name in fields))


def run_under(
    system: LoopedSystem, batch: Batch, n_steps: int, weights: Weights, read: Sequence[int] | None
) -> RolloutTrace:
    """Run one rollout under other weights."""
    with Replaced(system, as_stored(system, weights, n_steps)) as other:
        return trace(other, batch, n_steps, read)


def run_variants(
    context: Context,
    variants: Mapping[str, Weights],
    *,
    variant_seed: int | None = None,
    read: Sequence[int] | None = None,
    label: str = "variants",
) -> dict[str, Comparison]:
    """Compare several sets of weights (outputs first; empty for the unchanged model) with the unchanged model.

    The variants' initial states have the seed `variant_seed`, by default the reference's (paired runs). `read` has the
    step counts of the comparison, by default all. `label` names the stage, whose unit is the rollout of a batch.
    """
    system, tokens, n_steps = context.system, context.tokens, context.n_steps
    progress = context.execution.progress
    batches = list(tokens.batches(context.execution.batch_size, context.execution.seed))
    progress.start(label, len(batches) * (len(variants) + 1), "rollouts")
    parts: dict[str, list[Comparison]] = {name: [] for name in variants}
    for batch in batches:
        reference = trace(system, batch, n_steps, read)
        progress.advance()
        other = batch if variant_seed is None else dataclasses.replace(batch, seed=variant_seed)
        for name, weights in variants.items():
            run = run_under(system, other, n_steps, weights, read)
            parts[name].append(compare_traces(run, reference, system.output == "logits", tokens.scored_from))
            progress.advance()
    progress.stop()
    return {name: gather(pieces) for name, pieces in parts.items()}
