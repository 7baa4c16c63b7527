"""Weight changes other than rounding (Li, Table 15)."""

from __future__ import annotations

from dataclasses import replace

from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.sections import SECTIONS, Section
from loopq.layers.grid import PER_CHANNEL
from loopq.paper.diagnosis.perturbation import perturbation_study
from loopq.storage.schema import Object


def perturbations(context: Context) -> Object:
    """Rank-4 updates and output-matched noise at the exposed layers and in the core (Li, Table 15)."""
    config = context.config
    return perturbation_study(
        replace(context, tokens=context.prompts, train=context.training),
        config.layer(PER_CHANNEL),
        config.layer(config.group_size),
        seeds=config.seeds,
        n_updates=config.n_updates,
    )


def _rollouts(context: Context) -> int:
    trained = 6 * context.config.n_updates if context.training else 0
    return len(context.prompts.sequences) * (4 * len(context.config.seeds) + 1) + trained


SECTIONS.register("perturbation")(Section(perturbations, 80, exposed=True, compares=True, rollouts=_rollouts))
