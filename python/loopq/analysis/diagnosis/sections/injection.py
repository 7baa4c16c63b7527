"""Rounding of parts of the loop (Li, Table 3)."""

from __future__ import annotations

from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.exposure import controlled_injection
from loopq.analysis.diagnosis.sections import SECTIONS, Section
from loopq.layers.grid import PER_CHANNEL
from loopq.storage.schema import Object


def injection(context: Context) -> Object:
    """Controlled injection, per channel and grouped (Li, Table 3)."""
    config = context.config
    out: Object = {}
    for name, g in (("per channel", PER_CHANNEL), ("grouped", config.group_size)):
        out[name] = controlled_injection(context.on(context.prompts), config.layer(g))
    return out


def _rollouts(context: Context) -> int:
    n_variants = (5 if context.exposed else 2) + 1
    pairings = 2 if context.system.state_is_random else 1
    return len(context.prompts.sequences) * n_variants * pairings * 2


SECTIONS.register("injection")(Section(injection, 40, compares=True, rollouts=_rollouts))
