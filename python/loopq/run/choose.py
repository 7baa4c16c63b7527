"""Runs that are made of several: bits by a byte budget, tuning at the end."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from loopq.calibrate.data import TokenSet
from loopq.errors import ConfigError
from loopq.gradients.tuner import tune
from loopq.run.allocate import allocate
from loopq.storage.journal import fingerprint

if TYPE_CHECKING:
    from loopq.run.config import QuantConfig
    from loopq.run.engine import Layers, Run

#: Share of the calibration prompts that is held out where something is chosen by them.
HELD_OUT_SHARE = 0.25


def split_held_out(tokens: TokenSet, n_held_out: int | None) -> tuple[TokenSet, TokenSet]:
    """Hold the last prompts out for what has to be chosen.

    Parameters
    ----------
    tokens : TokenSet
        Calibration prompts.
    n_held_out : int, optional
        How many; a quarter when absent.

    Returns
    -------
    TokenSet
        Prompts to calibrate on.
    TokenSet
        Prompts held out.

    Raises
    ------
    ConfigError
        Nothing is left on one of the sides, or the same prompt is on both.
    """
    total = len(tokens.sequences)
    count = max(1, round(total * HELD_OUT_SHARE)) if n_held_out is None else n_held_out
    if not 0 < count < total:
        raise ConfigError(f"{count} of {total} prompts cannot be held out: both sides need at least one")
    kept, held = tokens.take(0, total - count), tokens.take(total - count)
    seen = {s.tobytes() for s in kept.sequences}
    if any(s.tobytes() in seen for s in held.sequences):
        raise ConfigError("a prompt that is held out is also calibrated on; give prompts without repeats")
    return kept, held


def refuse_unused_held_out(config: QuantConfig) -> None:
    """Refuse a number of held-out prompts where nothing is tuned.

    Raises
    ------
    ConfigError
        The message says what would use them.
    """
    if config.n_held_out is not None and config.tune is None:
        raise ConfigError("n_held_out goes with tune")


def solve(run: Run, held: TokenSet | None) -> tuple[Run, Layers, dict[str, Any]]:
    """Carry a run out with all that has to be chosen or tuned.

    Parameters
    ----------
    run : Run
        Collection and settings.
    held : TokenSet or None
        Prompts held out, where the settings tune.

    Returns
    -------
    Run
        With the settings that were chosen.
    dict of str to QuantizedLayer
        The layers.
    dict
        What was chosen and tuned, for the index and the report.
    """
    asked = run.config
    facts: dict[str, Any] = {}
    if asked.allocate is not None:
        config, facts["allocation"] = allocate(run, asked.allocate)
        run = run.with_config(config)
    layers = run.config.inputs.solve(run)
    if asked.tune is not None:
        assert held is not None
        layers, facts["tuning"] = _tuned(run, layers, held)
    return run, layers, facts


def refuse_short_scales(run: Run) -> None:
    """Refuse to tune layers whose scales are to keep fewer bits than their type has: tuning gives them all bits.

    Raises
    ------
    ConfigError
        The message names the layer.
    """
    for task in run.tasks:
        if run.config.tune is not None and task.config.grid.scale_bits is not None:
            raise ConfigError(
                f"layer {task.name}: tuned scales have all bits of their type, so that scale_bits = "
                f"{task.config.grid.scale_bits} cannot be kept: leave out one of scale_bits and tune"
            )


def _tuned(run: Run, layers: Layers, held: TokenSet) -> tuple[Layers, dict[str, Any]]:
    """Tune by gradient; the second result says what was asked and what came of it."""
    job, settings = run.job, run.config.tune
    assert settings is not None
    found = tune(
        job.system,
        layers,
        (job.tokens, held),
        settings,
        n_steps=job.selection.n_steps,
        execution=run.execution,
        # The held-out prompts are no part of what the run calibrates on, and decide here.
        journal=dataclasses.replace(run.journal("tune"), key=fingerprint(run.key(), held.digest())),
    )
    return found.layers, {
        "asked": settings.to_json() | {"seed": run.execution.seed},
        "updates": found.history[-1][0],
        "held_out_before": found.history[0][1],
        "held_out_after": min(v for _, v in found.history),
        "codes_flipped": found.flipped,
        "n_prompts": len(job.tokens.sequences),
        "n_held_out": len(held.sequences),
    }
