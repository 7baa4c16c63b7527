"""Overlap of state subspaces, and the exposed layers' output size (Li, App. O)."""

from __future__ import annotations

from loopq.diagnosis import overlap
from loopq.diagnosis.context import Context
from loopq.diagnosis.exposure import adapter_output_ratio
from loopq.diagnosis.sections import SECTIONS, Section
from loopq.storage.schema import Object
from loopq.systems.stepwise import single_steps


def overlaps(context: Context) -> Object:
    """Overlap of state subspaces between steps and seeds, and the exposed layers' output size (Li, App. O)."""
    seed, batch_size = context.execution.seed, context.execution.batch_size
    seeds = (seed, seed + 1) if context.system.state_is_random else (seed,)
    last = context.n_steps - 1
    # A state that grows is empty at first.
    steps = sorted({min(int(single_steps(context.system).grows), last), last})
    moments = {
        s: overlap.state_moments(context.system, context.tokens, context.n_steps, steps, s, batch_size)
        for s in seeds
    }
    ratio = {}
    if context.exposed:
        ratio = adapter_output_ratio(
            context.system, context.prompts, context.n_steps, seed=seed, batch_size=batch_size
        )
    return {"overlaps": overlap.subspace_survey(moments), "output_ratio": ratio}


def _rollouts(context: Context) -> int:
    return len(context.tokens.sequences) * (2 if context.system.state_is_random else 1)


SECTIONS.register("overlap")(Section(overlaps, 20, loop="the overlap of states", rollouts=_rollouts))
