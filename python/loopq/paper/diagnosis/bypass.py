"""The identity-bypass control: the same weight error with and without an identity path (Li, App. K)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.analysis.diagnosis.weights import Weights
from loopq.errors import ConfigError, require
from loopq.evaluation.stats import bootstrap, geometric_mean_ratio
from loopq.paper.diagnosis.stepmap import Bypass, StepMap, final_state, last_step, promoted
from loopq.paper.stats import holm, sign_flip
from loopq.storage.schema import Object
from loopq.systems.stepwise import single_steps

if TYPE_CHECKING:
    from torch import Tensor

    from loopq.analysis.diagnosis.context import Context
    from loopq.calibrate.data import TokenSet
    from loopq.systems.base import Batch, LoopedSystem

Floats = NDArray[np.float64]

RADII = (0.005, 0.01, 0.02)
#: Operating states: without and with the bypass.
_STATES = ("plain", "bypassed")


def unit_directions(shape: Sequence[int], n: int, seed: int) -> Any:
    """Random unit directions in a state's space as a float64 Tensor (n, *shape), the same for every map."""
    torch = require("torch")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    return drawn / drawn.flatten(1).norm(dim=1).reshape(n, *(1 for _ in shape))


def central_differences(step: StepMap, state: Tensor, directions: Tensor, radius: float) -> Tensor:
    """[F(s + eps ||s|| v) - F(s - eps ||s|| v)] / (2 eps ||s||) for each direction v, float64."""
    torch = require("torch")
    size = radius * float(state.double().norm())
    many = _together(step, len(directions))
    with torch.no_grad():
        if many is not None:
            moves = size * directions.to(state).flatten(0, 1)
            difference = many(state + moves).double() - many(state - moves).double()
            return (difference / (2 * size)).reshape(directions.shape)
        moves = [size * v.to(state) for v in directions]
        apart = [step(state + move).double() - step(state - move).double() for move in moves]
    return torch.stack(apart) / (2 * size)


def _together(step: StepMap, n: int) -> StepMap | None:
    """The step for n states of one prompt as a batch. None where the embedding is not a single tensor."""
    e = step.embedding
    if e is None:
        return step
    if not hasattr(e, "expand") or e.shape[0] != 1:
        return None
    return dataclasses.replace(step, embedding=e.expand(n, *e.shape[1:]))


def prompt_responses(
    system: LoopedSystem,
    batch: Batch,
    n_steps: int,
    weights: Weights,
    radii: Sequence[float],
    n_directions: int,
    at_bypassed: bool,
) -> Floats:
    """Difference of the rounded and the full-precision map's central differences at one prompt's operating state.

    Returns
    -------
    float64 ndarray of shape (n_radii, 2, 2)
        sqrt(sum_k ||r_Q - r_B||^2 / sum_k ||r_B||^2) and the root mean square of ||r_Q - r_B|| over the directions k,
        each without and with the bypass. Q is the rounded map and B the full-precision map.
    """
    with Bypass(system, n_steps) as bypass:
        embedding, state = final_state(system, batch, n_steps, bypass if at_bypassed else None)
    directions = unit_directions(state.shape, n_directions, seed=0)
    differences: dict[tuple[bool, bool, float], Any] = {}
    for changed in (False, True):
        for bypassed in (False, True):
            with last_step(system, embedding, n_steps, weights if changed else None, bypassed) as step:
                for radius in radii:
                    difference = central_differences(step, state, directions, radius)
                    differences[changed, bypassed, radius] = difference
    out = np.zeros((len(radii), 2, 2))
    for k, radius in enumerate(radii):
        for path in (False, True):
            base = differences[False, path, radius]
            top = float((differences[True, path, radius] - base).square().sum())
            out[k, :, int(path)] = top / max(float(base.square().sum()), 1e-300), top / n_directions
    return np.sqrt(out)


def bypass_study(
    context: Context,
    weights: Weights,
    *,
    radii: Sequence[float] = RADII,
    n_directions: int = 32,
    seeds: Sequence[int] = (0, 1, 2),
    n_resamples: int = 10_000,
) -> Object:
    """Measure how much an identity path around the exposed layer reduces the effect of its error (Li, App. K).

    Parameters
    ----------
    context : Context
        A model with a single-step function and one exposed adapter layer, prompts, and the depth of operating states.
    weights : weights
        Replaced weights of the changed map, outputs first.
    radii : sequence of float
        Perturbation sizes relative to the state's norm.
    n_directions : int
        Unit directions, shared by all maps.
    seeds : sequence of int
        Seeds of the initial states. Only the first is used where the state is not random.

    Returns
    -------
    dict
        `rows` has an entry per operating state and radius, with the mean D0 and D1. Operating states are final states
        of the full-precision rollout without and with the bypass. The attenuation is 1 - geometric mean of the prompts'
        D1/D0, with its bootstrap interval, as is that of the RMS mismatch before normalising. The sign-flip p is
        Holm-adjusted over the radii. `bypass_agreement` compares the full-precision rollouts with and without the
        bypass. It is low for a model trained without one.
    """
    if not radii or min(radii) <= 0:
        raise ConfigError(f"radii must be above 0; got {list(radii)}")
    system, tokens, n_steps = context.system, context.tokens, context.n_steps
    Bypass(system, n_steps)
    used = tuple(seeds) if system.state_is_random else tuple(seeds)[:1]
    progress = context.execution.progress
    progress.start("bypass", len(tokens.sequences) * len(used) * len(_STATES), "prompts")
    rows: list[Object] = []
    with promoted(system.model):
        for place in _STATES:
            at_bypassed = place == "bypassed"
            table = np.zeros((len(used), len(tokens.sequences), len(radii), 2, 2))
            for i, seed in enumerate(used):
                for j, batch in enumerate(tokens.batches(1, seed)):
                    table[i, j] = prompt_responses(
                        system, batch, n_steps, weights, radii, n_directions, at_bypassed
                    )
                    progress.advance()
            rows += _rows(place, table, radii, n_resamples)
        agreement = _bypass_agreement(system, tokens, n_steps, used[0])
    progress.stop()
    settings = {"radii": list(radii), "n_directions": n_directions, "seeds": list(used)}
    settings["n_prompts"] = len(tokens.sequences)
    return {"rows": rows, "bypass_agreement": agreement, "settings": settings}


def _rows(place: str, table: Floats, radii: Sequence[float], n_resamples: int) -> list[Object]:
    """Summarise the array (n_seeds, n_prompts, n_radii, 2, 2) of relative and rms values without and with bypass."""
    prompts = table.mean(axis=0)
    raw = [sign_flip(np.log(prompts[:, k, 0, 1] / prompts[:, k, 0, 0])) for k in range(len(radii))]
    adjusted = holm(raw)
    rows = []
    for k, radius in enumerate(radii):
        relative, rms = prompts[:, k, 0], prompts[:, k, 1]
        ratio = geometric_mean_ratio(relative[:, 1], relative[:, 0], n_resamples=n_resamples)
        plain = bootstrap(
            [rms[:, 1], rms[:, 0]],
            lambda a, b, axis: 1 - a.mean(axis) / b.mean(axis),
            n_resamples=n_resamples,
            method="prompt bootstrap of a ratio of means",
        )
        rows.append(
            {
                "state": place,
                "radius": radius,
                "D0": float(relative[:, 0].mean()),
                "D1": float(relative[:, 1].mean()),
                "attenuation": 1 - ratio.estimate,
                "attenuation_low": 1 - ratio.high,
                "attenuation_high": 1 - ratio.low,
                "rms_without": float(rms[:, 0].mean()),
                "rms_attenuation": plain.to_json(),
                "n_prompts": int(relative.shape[0]),
                "p": raw[k],
                "p_holm": float(adjusted[k]),
            }
        )
    return rows


def _bypass_agreement(system: LoopedSystem, tokens: TokenSet, n_steps: int, seed: int) -> float | None:
    if system.output != "logits":
        return None
    torch = require("torch")
    system, shares = single_steps(system), []
    for batch in tokens.batches(1, seed):
        with torch.no_grad():
            embedding, plain = final_state(system, batch, n_steps)
            top = system.predict(plain, embedding).argmax(-1)
            with Bypass(system, n_steps) as bypass:
                _, state = final_state(system, batch, n_steps, bypass)
            same = system.predict(state, embedding).argmax(-1) == top
        shares.append(float(same[:, tokens.scored_from :].double().mean()))
    return float(np.mean(shares))
