"""Displacement from the final state of full precision (Li, App. L)."""

from __future__ import annotations

from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.sections import SECTIONS, Section
from loopq.layers.grid import PER_CHANNEL
from loopq.paper.diagnosis.displacement import displacement
from loopq.paper.diagnosis.exposed import rounded_exposed
from loopq.storage.schema import Object


def displacements(context: Context) -> Object:
    """Displacement from the final state of full precision (Li, App. L)."""
    config = context.config
    out = {}
    for name, g in (("per channel", PER_CHANNEL), ("grouped", config.group_size)):
        out[name] = displacement(context.on(context.prompts), rounded_exposed(context, g)).to_json()
    return {"settings": out, "layers": [p.name for p in context.exposed] or "all"}


SECTIONS.register("displacement")(
    Section(
        displacements,
        70,
        loop="the displacement rollout",
        rollouts=lambda context: len(context.prompts.sequences) * 3 * 2,
    )
)
