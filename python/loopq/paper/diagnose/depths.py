"""Rollouts of several depths (Li, Fig. 1b)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loopq.diagnose.rollouts import run_variants
from loopq.diagnose.weights import Rounder, core_rounder, quantizable, rounded
from loopq.quantizers.config import LayerConfig
from loopq.terminal.progress import Progress

if TYPE_CHECKING:
    from loopq.calibrate.data import TokenSet
    from loopq.systems.base import LoopedSystem


def depth_curve(
    system: LoopedSystem,
    tokens: TokenSet,
    depths: Sequence[int],
    config: LayerConfig,
    *,
    rounder: Rounder = core_rounder,
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Round the whole loop and compare whole rollouts of several depths, each with the unchanged model's.

    Parameters
    ----------
    system : LoopedSystem
        The model's adapter; no step function is needed.
    tokens : TokenSet
        Prompts.
    depths : sequence of int
        Numbers of recurrences.
    config : LayerConfig
        Rounding.
    rounder, seed, batch_size, progress
        As in `run_variants`.

    Returns
    -------
    list of dict
        `depth`, and `agreement`, `kl` and `output_error` after the last step of that depth.
    """
    rows = []
    for depth in depths:
        changed = rounded(system, quantizable(system.shared_parameters(depth)), config, rounder)
        found = run_variants(
            system,
            tokens,
            depth,
            {"changed": changed},
            seed=seed,
            read=(depth,),
            batch_size=batch_size,
            progress=progress,
            label=f"depth {depth}",
        )["changed"].to_json()
        rows.append({"depth": depth} | {k: _last(found[k]) for k in ("agreement", "kl", "output_error")})
    return rows


def _last(values: list[float] | None) -> float | None:
    return None if values is None else values[-1]
