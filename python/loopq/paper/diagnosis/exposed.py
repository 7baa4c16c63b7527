"""The layers that the paper rounds: the exposed ones, or all if there are none."""

from __future__ import annotations

from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.weights import Matrix, quantizable, rounded


def rounded_exposed(context: Context, group_size: int) -> dict[str, Matrix]:
    """Rounded weights of the exposed layers, or of all layers if none is exposed."""
    chosen = context.exposed or quantizable(context.parameters)
    return rounded(context.system, chosen, context.config.layer(group_size), context.rounder)
