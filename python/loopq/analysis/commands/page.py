"""Measurements for commands that write a page."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from loopq.analysis.report.weights import tensors
from loopq.calibrate.data import TokenSet
from loopq.commands.options import execution
from loopq.evaluation.layers import N_PROMPTS, layer_errors
from loopq.formats.checkpoint import Checkpoint, weights_of
from loopq.models.load import LoadedModel
from loopq.systems.base import LoopedSystem
from loopq.terminal.progress import Line


def known(
    args: argparse.Namespace, loaded: LoadedModel, checkpoints: Mapping[str, Checkpoint], tokens: TokenSet
) -> dict[str, Any]:
    """Treatment of every tensor, and every layer's error at every step, as keywords of `write_page`.

    Parameters
    ----------
    args : Namespace
        Options of the command.
    loaded : LoadedModel
        The full-precision model.
    checkpoints : mapping of str to Checkpoint
        Quantized weights by name.
    tokens : TokenSet
        Prompts. The first few run.
    """
    how = execution(args)
    with Line() as progress:
        errors = layer_errors(
            loaded.system,
            {name: weights_of(checkpoint) for name, checkpoint in checkpoints.items()},
            tokens,
            n_steps=args.n_steps,
            seed=how.seed,
            batch_size=how.batch_size,
            progress=progress,
        )
    why = reasons(loaded.system, args.n_steps)
    return {
        "weights": {name: tensors(checkpoint, why) for name, checkpoint in checkpoints.items()},
        "errors": {"on": tokens.take(0, N_PROMPTS).describe(), "weights": errors},
    }


def reasons(system: LoopedSystem, n_steps: int | None = None) -> dict[str, str]:
    """Why a weight of the loop stays unchanged, if no checkpoint quantizes it. By name."""
    shared = system.shared_parameters(n_steps or system.n_steps)
    return {p.name: p.reason or "excluded by the settings" for p in shared} | system.left_out()
