"""The identity-bypass control (Li, App. K)."""

from __future__ import annotations

from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.sections import SECTIONS, Section
from loopq.layers.grid import PER_CHANNEL
from loopq.paper.diagnosis.bypass import bypass_study
from loopq.paper.diagnosis.exposed import rounded_exposed
from loopq.storage.schema import Object


def bypasses(context: Context) -> Object:
    """Identity-bypass control (Li, App. K)."""
    config = context.config
    return bypass_study(
        context.on(context.tokens.take(0, config.n_jacobian_prompts)),
        rounded_exposed(context, PER_CHANNEL),
        radii=config.radii,
        n_directions=config.n_directions,
        seeds=config.seeds,
    )


def _seconds(context: Context, step: float) -> float:
    # The directions run as one batch, at about half the cost.
    config = context.config
    n_prompts = min(config.n_jacobian_prompts, len(context.tokens.sequences))
    return n_prompts * context.n_seeds * 2 * 4 * len(config.radii) * config.n_directions * step


SECTIONS.register("bypass")(
    Section(bypasses, 100, loop="the identity bypass", exposed=True, seconds=_seconds)
)
