"""Rollouts of several depths (Li, Fig. 1b)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from loopq.diagnose.context import Context
from loopq.diagnose.rollouts import run_variants
from loopq.diagnose.weights import quantizable, rounded
from loopq.quantizers.config import LayerConfig


def depth_curve(context: Context, depths: Sequence[int], config: LayerConfig) -> list[dict[str, Any]]:
    """Round the whole loop and compare rollouts of several depths, each with the unchanged model.

    Parameters
    ----------
    context : Context
        Model and prompts. It needs no step function, and the context's depth is not used.
    depths : sequence of int
        Numbers of recurrences.
    config : LayerConfig
        Rounding.

    Returns
    -------
    list of dict
        `depth`, then the values after its last step: `agreement`, `kl` (with logits) and `output_error`. `last` holds
        the same by prompt.
    """
    rows = []
    for depth in depths:
        deep = replace(context, n_steps=depth)
        changed = rounded(context.system, quantizable(deep.parameters), config, context.rounder)
        runs = run_variants(deep, {"changed": changed}, read=(depth,), label=f"depth {depth}")
        last = runs["changed"].to_json()["last"]
        rows.append(
            {"depth": depth, "last": last} | {k: float(np.mean(values)) for k, values in last.items()}
        )
    return rows
