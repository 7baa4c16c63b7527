"""Runs that are made of several: bits by a byte budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loopq.run.allocate import allocate

if TYPE_CHECKING:
    from loopq.run.engine import Layers, Run


def solve(run: Run) -> tuple[Run, Layers, dict[str, Any]]:
    """Carry a run out with all that has to be chosen.

    Parameters
    ----------
    run : Run
        Collection and settings.

    Returns
    -------
    Run
        With the settings that were chosen.
    dict of str to QuantizedLayer
        The layers.
    dict
        What was chosen, for the index and the report.
    """
    asked = run.config.allocate
    facts: dict[str, Any] = {}
    if asked is not None:
        config, facts["allocation"] = allocate(run, asked)
        run = run.with_config(config)
    return run, run.config.inputs.solve(run), facts
