"""How long a diagnosis will take, from one timed batch of rollouts, one timed step and one count of eigenvalues."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from loopq.diagnose import rank
from loopq.diagnose.context import Context
from loopq.diagnose.rollouts import trace
from loopq.diagnose.weights import input_blocks, quantizable

# Jacobian products of one map: about 300 for each of two start vectors and 60 for the norm.
_PRODUCTS = 2 * 300 + 60

# Width of the matrix that is timed, and inputs whose spectra are computed: those drawn, and some that were the lowest
# rank or the largest gain before another one was found.
_PROBE = 1024
_DRAWN = 6


def estimate(context: Context, run: Sequence[str]) -> dict[str, Any]:
    """Estimate the time and memory of the sections.

    Returns
    -------
    dict
        `seconds` in total, `n_prompt_rollouts`, `seconds_per_rollout`, `hessian_bytes`, and `sections`: rollouts
        and seconds of each.
    """
    rollout, step = _time_rollout(context)
    rollouts = _rollouts(context)
    config = context.config
    n_jacobian = min(config.n_jacobian_prompts, len(context.tokens.sequences))
    maps = 8 if context.exposed else 2
    # A product takes about as long as two steps; a map with many eigenvalues of one size runs up to the limit.
    # The directions of the bypass run as one batch, at about half the price.
    extra = {
        "ranks": _rank_seconds(context),
        "jacobian": n_jacobian * maps * _PRODUCTS * 2 * step,
        "bypass": n_jacobian * _n_seeds(context) * 2 * 4 * len(config.radii) * config.n_directions * step,
    }
    parts = {
        name: {
            "n_prompt_rollouts": rollouts.get(name, 0),
            "seconds": rollouts.get(name, 0) * rollout + extra.get(name, 0.0),
        }
        for name in run
    }
    return {
        "seconds": sum(p["seconds"] for p in parts.values()),
        "n_prompt_rollouts": sum(p["n_prompt_rollouts"] for p in parts.values()),
        "seconds_per_rollout": rollout,
        "hessian_bytes": _hessian_bytes(context) if "ranks" in run else 0,
        "sections": parts,
    }


def _n_seeds(context: Context) -> int:
    return len(context.config.seeds) if context.system.state_is_random else 1


def _rollouts(context: Context) -> dict[str, int]:
    """Rollouts of one prompt that each section runs."""
    config = context.config
    prompts = len(context.prompts.sequences)
    n_ablation = min(config.n_ablation_prompts, len(context.tokens.sequences))
    n_layers = len(quantizable(context.parameters))
    n_injected = (5 if context.exposed else 2) + 1
    pairings = 2 if context.system.state_is_random else 1
    return {
        "ranks": len(context.tokens.sequences),
        "overlap": len(context.tokens.sequences) * pairings,
        "ablation": n_ablation * (2 * n_layers + 4),
        "injection": prompts * n_injected * pairings * 2,
        "feedback": prompts * _n_seeds(context) * 2 * 3 * (len(config.lambdas) + 1),
        "groups": prompts * (len(config.group_sizes) + 1),
        "displacement": prompts * 3 * 2,
        "perturbation": prompts * (4 * len(config.seeds) + 1)
        + (6 * config.n_updates if context.train else 0),
    }


def _time_rollout(context: Context) -> tuple[float, float]:
    """Seconds of a prompt's rollout within a batch, and of one step of a single prompt, each after a warm-up."""
    system, n, config = context.system, context.n_steps, context.config

    def timed(n_prompts: int, read: tuple[int, ...] | None) -> float:
        batch = next(context.tokens.take(0, n_prompts).batches(n_prompts, config.seed))
        seconds = 0.0
        for _ in range(2):
            began = time.monotonic()
            trace(system, batch, n, read)
            seconds = time.monotonic() - began
        return seconds

    together = min(config.batch_size, len(context.tokens.sequences))
    return timed(together, None) / together, timed(1, (n,)) / n


def _rank_seconds(context: Context) -> float:
    """Seconds of all counts and of the spectra that are drawn: one of each timed, scaled by the cube of the width."""
    groups = context.selection.distinct_inputs
    probe = min(_PROBE, max((p.in_features for p in groups), default=1))
    h = np.eye(probe)

    def unit(run: Callable[..., object]) -> float:
        began = time.monotonic()
        run(h, threads=context.threads)
        return (time.monotonic() - began) / probe**3

    per_count, per_spectrum = unit(rank.count), unit(rank.spectrum)
    total = 0.0
    for p in groups:
        # The two blocks of a concatenated input are counted as well, each at an eighth of the cost.
        share = 1.25 if input_blocks(p) else 1.0
        counted = len(rank.steps_to_count(p.invocations, p.in_features)) + 1
        total += share * per_count * p.in_features**3 * counted
        total += 3 * per_spectrum * p.in_features**3 * min(1.0, _DRAWN / len(groups))
    return total


def _hessian_bytes(context: Context) -> int:
    sums = context.sums()
    passes = sums.passes()
    return max((sum(sums.n_bytes(name) for name in names) for names in passes), default=0)
