"""The whole loop rounded at several group sizes (Li, Table 17)."""

from __future__ import annotations

from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.exposure import group_size_sweep
from loopq.analysis.diagnosis.sections import SECTIONS, Section
from loopq.storage.schema import Object


def groups(context: Context) -> Object:
    """Group-size sweep of the whole loop (Li, Table 17)."""
    config = context.config
    rows = group_size_sweep(context.on(context.prompts), config.layer(config.group_size), config.group_sizes)
    return {"rows": rows}


def _rollouts(context: Context) -> int:
    return len(context.prompts.sequences) * (len(context.config.group_sizes) + 1)


SECTIONS.register("groups")(Section(groups, 60, compares=True, rollouts=_rollouts))
