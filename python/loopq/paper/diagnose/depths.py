"""Rollouts of several depths (Li, Fig. 1b)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from loopq.diagnose.context import Context
from loopq.diagnose.rollouts import run_variants
from loopq.diagnose.weights import quantizable, rounded
from loopq.quantizers.config import LayerConfig


def depth_curve(context: Context, depths: Sequence[int], config: LayerConfig) -> list[dict[str, Any]]:
    """Round the whole loop and compare whole rollouts of several depths, each with the unchanged model's.

    Parameters
    ----------
    context : Context
        Model and prompts; no step function is needed, and the context's own depth is not read.
    depths : sequence of int
        Numbers of recurrences.
    config : LayerConfig
        Rounding.

    Returns
    -------
    list of dict
        `depth`, and `agreement`, `kl` and `output_error` after the last step of that depth.
    """
    rows = []
    for depth in depths:
        deep = replace(context, n_steps=depth)
        changed = rounded(context.system, quantizable(deep.parameters), config, context.rounder)
        runs = run_variants(deep, {"changed": changed}, read=(depth,), label=f"depth {depth}")
        found = runs["changed"].to_json()
        rows.append({"depth": depth} | {k: _last(found[k]) for k in ("agreement", "kl", "output_error")})
    return rows


def _last(values: list[float] | None) -> float | None:
    return None if values is None else values[-1]
