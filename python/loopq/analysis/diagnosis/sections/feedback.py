"""The feedback intervention: the share of the final error caused by feedback (Li, App. E)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.rollouts import RolloutTrace, relative_error, trace
from loopq.analysis.diagnosis.sections import SECTIONS, Section
from loopq.analysis.diagnosis.weights import (
    Matrix,
    Rounder,
    Weights,
    as_stored,
    core_rounder,
    input_blocks,
    keep_columns,
    quantizable,
    rounded,
    weight_of,
)
from loopq.errors import ConfigError, require
from loopq.evaluation.stats import geometric_mean_ratio
from loopq.layers.grid import PER_CHANNEL
from loopq.models.replace import Replaced
from loopq.quantizers.config import LayerConfig
from loopq.storage.schema import Object
from loopq.systems.stepwise import SingleSteps, single_steps, steps_of

if TYPE_CHECKING:
    from torch import Tensor

    from loopq.analysis.diagnosis.context import Context
    from loopq.systems.base import Batch, LoopedSystem
    from loopq.terminal.progress import Progress


Floats = NDArray[np.float64]

LAMBDAS = (0.0, 0.25, 0.5, 0.75, 1.0)


def intervened(
    system: LoopedSystem, batch: Batch, n_steps: int, reference: RolloutTrace, strength: float
) -> Tensor:
    """Final state of a rollout that feeds back only part of the error.

    Every step receives s_t + strength * (s'_t - s_t). s_t is the reference's state. s'_t is the state of this rollout,
    which uses the model's current weights.

    Parameters
    ----------
    system : LoopedSystem
        The model's adapter, with a single-step function.
    batch : Batch
        The reference's batch.
    reference : RolloutTrace
        Rollout of the same batch with the reference weights.
    strength : float
        lambda. 1 gives the ordinary rollout, bit for bit. 0 cuts the feedback.

    Notes
    -----
    `torch.lerp` returns its ends exactly, while s + 1 * (s' - s) would round.
    """
    torch = require("torch")
    system = single_steps(system)
    with torch.no_grad():
        embedding = system.embed(batch)
        state = reference.states[0]
        for t in range(system.n_updates(n_steps)):
            entering = torch.lerp(reference.states[t], state, strength)
            state = system.step(entering, embedding, t, n_steps)
    return state


@dataclass(frozen=True)
class FeedbackCurve:
    """Final error and agreement by feedback strength.

    Parameters
    ----------
    lambdas : tuple of float
        Feedback strengths, ascending.
    error : float64 ndarray of shape (n_lambdas, n_prompts)
        Relative error of the final state. Mean over initial-state seeds.
    agreement : float64 ndarray of shape (n_lambdas, n_prompts), or None
        Top-1 agreement at the end over the scored positions. Mean over seeds.
    n_seeds : int
        Initial-state seeds.
    returned : float64 ndarray of shape (n_prompts,), or None
        Cosine of an error that has passed one more step with that step's own error, at the last step. Mean over seeds.
        None for a loop of one step, or one whose state grows.
    """

    lambdas: tuple[float, ...]
    error: Floats
    agreement: Floats | None
    n_seeds: int
    returned: Floats | None = None

    def to_json(self, seed: int = 0) -> Object:
        """Curves, their monotonicity, and the ratio of both ends with its prompt bootstrap.

        `ratio` is None where a prompt's error is exactly 0 at one end.
        """
        ratio = None
        if (self.error[[0, -1]] > 0).all():
            ratio = geometric_mean_ratio(
                self.error[-1], self.error[0], n_resamples=10_000, seed=seed
            ).to_json()
        # A decrease within floating-point rounding does not break monotonicity.
        rising = np.diff(self.error, axis=0) >= -1e-9 * self.error[1:]
        return {
            "lambdas": list(self.lambdas),
            "error": self.error.mean(axis=1).tolist(),
            "agreement": None if self.agreement is None else self.agreement.mean(axis=1).tolist(),
            "mean_is_monotone": bool((np.diff(self.error.mean(axis=1)) >= 0).all()),
            "monotone_prompts": int(rising.all(axis=0).sum()),
            "n_prompts": int(self.error.shape[1]),
            "n_seeds": self.n_seeds,
            "ratio": ratio,
            "returned": None if self.returned is None else float(self.returned.mean()),
        }


def feedback_curve(
    context: Context,
    weights: Weights,
    *,
    lambdas: Sequence[float] = LAMBDAS,
    seeds: Sequence[int] = (0, 1, 2),
    label: str = "feedback",
) -> FeedbackCurve:
    """Run the intervention for one set of weights (Li, App. E).

    Parameters
    ----------
    context : Context
        A model with a single-step function, depth, and prompts. Those of Li, App. E are disjoint from calibration.
    weights : weights
        Replaced weights, outputs first.
    lambdas : sequence of float
        Feedback strengths between 0 and 1.
    seeds : sequence of int
        Seeds of the initial states, the same for all strengths. One is enough where the state is not random.

    Raises
    ------
    ConfigError
        If the system has no single-step function, or a strength lies outside 0 to 1.
    """
    system = steps_of(context.system)
    if system is None:
        raise ConfigError(
            f"system {context.system.name!r} has no single-step function: its feedback cannot be changed"
        )
    chosen = tuple(sorted(lambdas))
    if not chosen or chosen[0] < 0 or chosen[-1] > 1:
        raise ConfigError(f"feedback strengths lie between 0 and 1; got {list(lambdas)}")
    tokens, n_steps = context.tokens, context.n_steps
    batch_size, progress = context.execution.batch_size, context.execution.progress
    n_batches = len(tokens.plan(batch_size))
    progress.start(label, len(seeds) * n_batches * (len(chosen) + 1), "rollouts")
    errors, agreements, returned = [], [], []
    for seed in seeds:
        parts = [
            _one_batch(system, batch, n_steps, weights, chosen, progress, tokens.scored_from)
            for batch in tokens.batches(batch_size, seed)
        ]
        errors.append(np.concatenate([p[0] for p in parts], axis=1))
        if system.output == "logits":
            agreements.append(np.concatenate([p[1] for p in parts], axis=1))
        returned += [np.concatenate([p[2] for p in parts])] if parts[0][2].size else []
    progress.stop()
    agreement, cosine = (np.mean(values, axis=0) if values else None for values in (agreements, returned))
    return FeedbackCurve(chosen, np.mean(errors, axis=0), agreement, len(seeds), cosine)


def _one_batch(
    system: SingleSteps,
    batch: Batch,
    n_steps: int,
    weights: Weights,
    lambdas: Sequence[float],
    progress: Progress,
    scored_from: int,
) -> tuple[Floats, Floats, Floats]:
    torch = require("torch")
    reference = trace(system, batch, n_steps, read=(n_steps,))
    progress.advance()
    top = reference.outputs[n_steps].argmax(-1)[:, scored_from:]
    errors, agreements = [], []
    with Replaced(system, as_stored(system, weights, n_steps)) as other, torch.no_grad():
        embedding = other.embed(batch)
        for strength in lambdas:
            state = intervened(other, batch, n_steps, reference, strength)
            errors.append(relative_error(state, reference.states[-1]))
            same = other.predict(state, embedding).argmax(-1)[:, scored_from:] == top
            agreements.append(same.double().mean(dim=1).cpu().numpy())
            progress.advance()
    return np.stack(errors), np.stack(agreements), _returned(system, batch, n_steps, weights, reference)


def _returned(
    system: SingleSteps, batch: Batch, n_steps: int, weights: Weights, reference: RolloutTrace
) -> Floats:
    """Cosine of the last but one step's own error, after the last step, with the last step's own, by prompt.

    Its sign decides whether a fed-back error adds to the new one. Empty for a loop of one step, or a growing state.
    """
    torch = require("torch")
    states, last = reference.states, system.n_updates(n_steps) - 1
    if last < 1 or states[-1].shape != states[-3].shape:
        return np.empty(0)
    with torch.no_grad():
        with Replaced(system, as_stored(system, weights, n_steps)) as other:
            given = other.embed(batch)
            before, own = (other.step(states[t], given, t, n_steps) - states[t + 1] for t in (last - 1, last))
        passed = system.step(states[last] + before, system.embed(batch), last, n_steps) - states[last + 1]
        pair = (x.double().flatten(1) for x in (passed, own))
        cosine: Floats = torch.nn.functional.cosine_similarity(*pair, dim=1, eps=1e-30).cpu().numpy()
    return cosine


def split_weights(
    system: LoopedSystem, n_steps: int, config: LayerConfig, rounder: Rounder = core_rounder
) -> dict[str, dict[str, Matrix]]:
    """Round each exposed layer once. Apply the rounded values to all columns or to one input block (Li, App. E).

    Without an exposed layer, all layers are rounded.

    Returns
    -------
    dict of str to weights
        "all columns", and one entry per block of a concatenated input. A group that spans two blocks keeps its scale
        in both.
    """
    parameters = system.shared_parameters(n_steps)
    exposed = [p for p in parameters if p.exposed]
    full = rounded(system, exposed or quantizable(parameters), config, rounder)
    variants: dict[str, dict[str, Matrix]] = {"all columns": dict(full)}
    for p in exposed:
        for block, columns in input_blocks(p).items():
            part = keep_columns(weight_of(system, p), full[p.name], columns)
            variants.setdefault(f"{block} columns", {})[p.name] = part
    return variants


def feedback_study(
    context: Context,
    configs: Mapping[str, LayerConfig],
    *,
    lambdas: Sequence[float] = LAMBDAS,
    seeds: Sequence[int] = (0, 1, 2),
) -> dict[str, Object]:
    """Run the intervention for several rounding settings on the variants of `split_weights`.

    Parameters
    ----------
    configs : mapping of str to LayerConfig
        Settings by name, such as "per channel" and "grouped".

    Returns
    -------
    dict of str to dict of str to dict
        Setting -> columns -> `FeedbackCurve.to_json`.
    """
    used = seeds if context.system.state_is_random else seeds[:1]
    out: dict[str, Object] = {}
    for setting, config in configs.items():
        variants = split_weights(context.system, context.n_steps, config, context.rounder)
        out[setting] = {
            columns: feedback_curve(
                context, weights, lambdas=lambdas, seeds=used, label=f"feedback {setting}"
            ).to_json()
            for columns, weights in variants.items()
            if weights
        }
    return out


def feedback(context: Context) -> Object:
    """Feedback intervention on the exposed layers, whole and by input block, or on all layers (Li, App. E)."""
    config = context.config
    settings = {"per channel": config.layer(PER_CHANNEL), "grouped": config.layer(config.group_size)}
    curves = feedback_study(context.on(context.prompts), settings, lambdas=config.lambdas, seeds=config.seeds)
    return {"settings": curves, "layers": [p.name for p in context.exposed] or "all"}


def _rollouts(context: Context) -> int:
    return len(context.prompts.sequences) * context.n_seeds * 2 * 3 * (len(context.config.lambdas) + 1)


SECTIONS.register("feedback")(
    Section(feedback, 50, loop="the feedback intervention", compares=True, rollouts=_rollouts)
)
