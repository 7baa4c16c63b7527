"""Runs that are made of several: step weights chosen by held-out prompts, bits by a byte budget, tuning at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.data import TokenSet
from loopq.checkpoint.layer import QuantizedLayer
from loopq.config import HELD_OUT_SHARE, VALIDATED, AllocateConfig, QuantConfig
from loopq.errors import ConfigError
from loopq.jobs.run import Run, duration
from loopq.progress import Progress
from loopq.quantizers.allocate import Allocation, Choice, allocate
from loopq.quantizers.solve import Task
from loopq.systems.base import LoopedSystem

if TYPE_CHECKING:
    from loopq.tune.tuner import TuneConfig

Layers = dict[str, QuantizedLayer]


def on_top(run: Run, allocate: AllocateConfig | None, tune: TuneConfig | None) -> str:
    """Say what choosing bits and tuning take besides the quantization, by the rollout that `run` timed; or nothing."""
    parts = []
    n_prompts = len(run.job.tokens.sequences)
    if allocate is not None:
        prompts = min(allocate.n_prompts, n_prompts)
        ways = len(allocate.bits) * len(allocate.group_sizes) * len(run.tasks)
        # One rollout of each way for a measured score; forward and backward once for a predicted one.
        rollouts = prompts * (ways if allocate.score == "ablation" else 3)
        parts.append(f"bits by {allocate.score} {duration(run.probe_seconds * rollouts)}")
    if tune is not None:
        # The full-precision rollout, and one with its backward pass.
        rollouts = 4 * tune.n_updates * min(tune.batch_size, n_prompts)
        parts.append(f"tuning at most {duration(run.probe_seconds * rollouts)}")
    return f"; on top, about: {', '.join(parts)}" if parts else ""


def held_back(tokens: TokenSet, n_held_out: int | None) -> tuple[TokenSet, TokenSet]:
    """Cut the last prompts off for what has to be chosen.

    Parameters
    ----------
    tokens : TokenSet
        Calibration prompts.
    n_held_out : int, optional
        How many; a quarter when absent.

    Raises
    ------
    ConfigError
        Nothing is left on one of the sides, or the same prompt is on both.
    """
    total = len(tokens.sequences)
    count = max(1, round(total * HELD_OUT_SHARE)) if n_held_out is None else n_held_out
    if not 0 < count < total:
        raise ConfigError(f"{count} of {total} prompts cannot be held back: both sides need at least one")
    kept, held = tokens.take(0, total - count), tokens.take(total - count)
    seen = {s.tobytes() for s in kept.sequences}
    if any(s.tobytes() in seen for s in held.sequences):
        raise ConfigError("a prompt that is held back is also calibrated on; give prompts without repeats")
    return kept, held


def validated(
    system: LoopedSystem,
    solve: Callable[[QuantConfig], Layers],
    config: QuantConfig,
    held: TokenSet,
    n_steps: int,
    seed: int,
) -> tuple[Layers, QuantConfig, dict[str, Any]]:
    """Quantize by every step weighting of `VALIDATED` and keep the one of least KL on the prompts held back."""
    tried: dict[str, tuple[float, Layers, QuantConfig]] = {}
    for spec in VALIDATED:
        asked = dataclasses.replace(config, layer=dataclasses.replace(config.layer, step_weights=spec))
        layers = solve(asked)
        tried[spec] = (_cost(system, layers, held, n_steps, seed), layers, asked)
    chosen = min(tried, key=lambda spec: tried[spec][0])
    facts = {"chosen": chosen, "kl": {k: v[0] for k, v in tried.items()}, "n_prompts": len(held.sequences)}
    marked = {n: layer.with_report(step_weights_asked="validated") for n, layer in tried[chosen][1].items()}
    return marked, tried[chosen][2], facts


def _cost(system: LoopedSystem, layers: Layers, tokens: TokenSet, n_steps: int, seed: int) -> float:
    from loopq.evaluate.compare import compare

    weights = {"quantized": {n: layer.in_model_orientation() for n, layer in layers.items()}}
    return float(compare(system, weights, tokens, n_steps=n_steps, seeds=(seed,))[1].kl.mean())


def mixed(
    run: Run, config: QuantConfig, asked: AllocateConfig, progress: Progress
) -> tuple[QuantConfig, dict[str, Any]]:
    """Choose bits and group size of every layer under a byte budget.

    Parameters
    ----------
    run : Run
        Its job and its tasks: the layers that are quantized.
    config : QuantConfig
        Settings; each way is quantized by them, open loop, with other bits and group size.
    asked : AllocateConfig
        Budget, score and ways.
    progress : Progress
        Told of rollouts.

    Returns
    -------
    QuantConfig
        `config` with an override for every layer.
    dict
        What was asked, what it came to and what it cost, for the report.
    """
    sums = run.all_steps(progress)
    plain = dataclasses.replace(config.layer, metric="inputs", step_weights="sum")
    sizes: dict[tuple[str, str], tuple[int, int, int]] = {}
    ways: dict[tuple[str, str], NDArray[np.float32]] = {}
    for bits in asked.bits:
        for group in asked.group_sizes:
            way = dataclasses.replace(plain, bits=bits, group_size=group)
            for name, layer in run.solve_from(sums, dataclasses.replace(config, layer=way)).items():
                # An override may have fixed either; then several ways are one and the same.
                key = (name, f"INT{layer.bits} g{layer.group_size}")
                sizes[key] = (layer.bits, layer.group_size, layer.n_bytes)
                ways[key] = layer.in_model_orientation()
    costs = _scores(run, ways, asked, progress)
    choices = [Choice(key[0], b, n, costs[key], g) for key, (b, g, n) in sizes.items()]
    n_weights = sum(t.parameter.in_features * t.parameter.out_features for t in run.tasks)
    found = allocate(choices, asked.n_bytes(n_weights))
    return found.apply(config), _facts(found, asked, n_weights)


def _scores(
    run: Run, ways: Mapping[tuple[str, str], NDArray[np.float32]], asked: AllocateConfig, progress: Progress
) -> dict[tuple[str, str], float]:
    from loopq.tune.scores import loop_fisher, measured

    job = run.job
    tokens = job.tokens.take(0, asked.n_prompts)
    score = measured if asked.score == "ablation" else loop_fisher
    found = score(job.system, ways, tokens, n_steps=job.selection.n_steps, seed=job.seed, progress=progress)
    return {s.name: s.cost for s in found}


def _facts(found: Allocation, asked: AllocateConfig, n_weights: int) -> dict[str, Any]:
    return {
        "asked": dataclasses.asdict(asked),
        "budget_bytes": asked.n_bytes(n_weights),
        "n_bytes": found.n_bytes,
        "bits_a_weight": 8 * found.n_bytes / n_weights,
        "predicted_cost": found.cost,
        "layers": {n: {"bits": b, "group_size": found.group_sizes[n]} for n, b in found.bits.items()},
    }


def refuse_short_scales(tasks: Sequence[Task]) -> None:
    """Refuse layers whose scales are to keep fewer bits than their type has: tuning gives them all bits.

    Raises
    ------
    ConfigError
        The message names the layer.
    """
    for task in tasks:
        if task.config.scale_bits is not None:
            raise ConfigError(
                f"layer {task.parameter.name}: tuned scales have all bits of their type, so that scale_bits = "
                f"{task.config.scale_bits} cannot be kept: leave out one of scale_bits and tune"
            )


def tuned(
    system: LoopedSystem,
    layers: Layers,
    tokens: TokenSet,
    held: TokenSet,
    config: TuneConfig,
    n_steps: int,
    progress: Progress,
) -> tuple[Layers, dict[str, Any]]:
    """Run the gradient tier; the second result says what was asked and what came of it."""
    from loopq.tune.tuner import tune

    found = tune(system, layers, tokens, held, config, n_steps=n_steps, progress=progress)
    best = min(v for _, v in found.history)
    facts = {
        "asked": dataclasses.asdict(config),
        "updates": found.history[-1][0],
        "held_out_before": found.history[0][1],
        "held_out_after": best,
        "codes_flipped": found.flipped,
        "n_prompts": len(tokens.sequences),
        "n_held_out": len(held.sequences),
    }
    return found.layers, facts
