"""Error fed back by the loop (Li, App. E)."""

from __future__ import annotations

from loopq.diagnosis.context import Context
from loopq.diagnosis.feedback import feedback_study
from loopq.diagnosis.sections import SECTIONS, Section
from loopq.layers.grid import PER_CHANNEL
from loopq.storage.schema import Object


def feedback(context: Context) -> Object:
    """Feedback intervention on the exposed layers, whole and by input block, or on all layers (Li, App. E)."""
    config = context.config
    settings = {"per channel": config.layer(PER_CHANNEL), "grouped": config.layer(config.group_size)}
    found = feedback_study(context.on(context.prompts), settings, lambdas=config.lambdas, seeds=config.seeds)
    return {"settings": found, "layers": [p.name for p in context.exposed] or "all"}


def _rollouts(context: Context) -> int:
    return len(context.prompts.sequences) * context.n_seeds * 2 * 3 * (len(context.config.lambdas) + 1)


SECTIONS.register("feedback")(
    Section(feedback, 50, loop="the feedback intervention", compares=True, rollouts=_rollouts)
)
