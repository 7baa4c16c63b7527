"""Estimate the time of a diagnosis from one timed batch of rollouts, one step and one eigenvalue count."""

from __future__ import annotations

import time
from collections.abc import Sequence

from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.rollouts import trace
from loopq.analysis.diagnosis.sections import SECTIONS
from loopq.storage.schema import Object


def estimate(context: Context, run: Sequence[str]) -> Object:
    """Estimate the time and memory of the sections.

    Returns
    -------
    dict
        `seconds` is the total. `n_prompt_rollouts`, `seconds_per_rollout` and `hessian_bytes` follow. `sections` holds
        rollouts and seconds of each section.
    """
    rollout, step = _time_rollout(context)
    parts = {}
    for name in run:
        section = SECTIONS.get(name)
        n = section.rollouts(context)
        parts[name] = {"n_prompt_rollouts": n, "seconds": n * rollout + section.seconds(context, step)}
    return {
        "seconds": sum(p["seconds"] for p in parts.values()),
        "n_prompt_rollouts": sum(p["n_prompt_rollouts"] for p in parts.values()),
        "seconds_per_rollout": rollout,
        "hessian_bytes": _hessian_bytes(context) if "ranks" in run else 0,
        "sections": parts,
    }


def _time_rollout(context: Context) -> tuple[float, float]:
    """Seconds per prompt of a batched rollout, and of one step of a single prompt, each after a warm-up."""
    system, n, execution = context.system, context.n_steps, context.execution

    def timed(n_prompts: int, read: tuple[int, ...] | None) -> float:
        batch = next(context.tokens.take(0, n_prompts).batches(n_prompts, execution.seed))
        seconds = 0.0
        for _ in range(2):
            began = time.monotonic()
            trace(system, batch, n, read)
            seconds = time.monotonic() - began
        return seconds

    together = min(execution.batch_size, len(context.tokens.sequences))
    return timed(together, None) / together, timed(1, (n,)) / n


def _hessian_bytes(context: Context) -> int:
    sums = context.sums()
    passes = sums.passes()
    return max((sum(sums.n_bytes(name) for name in names) for names in passes), default=0)
