"""The single path from settings to a checkpoint, for every source and any number of processes."""

from __future__ import annotations

from loopq.formats.checkpoint import Checkpoint
from loopq.run.plan import Plan
from loopq.run.result import Write, assemble
from loopq.run.solving import solve, solve_outside
from loopq.run.source import Layers, Source
from loopq.run.together import Team


def carry_out(plan: Plan, source: Source, write: Write, team: Team | None = None) -> Checkpoint | None:
    """Solve all layers, combine them with the rest of the model, and write the result.

    Parameters
    ----------
    plan, source
        A plan that the source has prepared.
    write : callable
        Takes the checkpoint and writes the output.
    team : Team, optional
        Other processes that solve the same plan. They divide the layers, and the last one combines and writes them.

    Returns
    -------
    Checkpoint or None
        The result. None if another process of the team writes it.
    """

    def combine(layers: Layers) -> Checkpoint:
        checkpoint = assemble(plan, source, layers | solve_outside(plan, source))
        write(checkpoint)
        return checkpoint

    if team is None:
        return combine(solve(plan.config.inputs, plan, source))
    return team.divide(plan, source, combine)
