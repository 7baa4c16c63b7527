"""Locate the error in the loop: compare every layer's output at every step with full precision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from loopq.calibrate.data import TokenSet
from loopq.calibrate.hooks import Observer
from loopq.layers.shared import SharedParameter
from loopq.models.replace import Replaced, Weights, placed
from loopq.systems.base import Batch, LoopedSystem
from loopq.systems.declare import parameter_of
from loopq.terminal.progress import Progress, Silent

if TYPE_CHECKING:
    from torch import Tensor

#: Prompts that are enough for a map, and rows kept of one call: they bound time and memory.
N_PROMPTS, N_ROWS = 16, 64

LayerErrors = dict[str, dict[str, list[float | None]]]


def layer_errors(
    system: LoopedSystem,
    variants: Mapping[str, Weights],
    tokens: TokenSet,
    *,
    n_steps: int | None = None,
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> dict[str, LayerErrors]:
    """Measure how far every layer's output is from full precision at each of its calls.

    Parameters
    ----------
    system : LoopedSystem
        Adapter of the full-precision model.
    variants : mapping of str to weights
        Quantized weights by the variant's name, as in `compare`.
    tokens : TokenSet
        Prompts. The first `N_PROMPTS` run.
    n_steps : int, optional
        Depth. The system's default when absent.
    seed, batch_size : int
        Seed of the initial states, the same for all weights, and prompts per batch.
    progress : Progress, optional
        Receives the steps of the work.

    Returns
    -------
    dict of str to dict
        For each variant "moved" and "own": a layer's name to one number per call, None if not finite.

    Notes
    -----
    X and Y = X W^T are a layer's inputs and outputs at step t of the full-precision rollout, X^ and W^ those of the
    quantized one. "moved" is the error accumulated through the loop, ||X^ W^^T - Y||_F / ||Y||_F, and "own" the part
    that this weight adds, ||X (W^ - W)^T||_F / ||Y||_F. Sums use at most `N_ROWS` evenly spaced rows, without biases.
    """
    progress = progress or Silent()
    depth = system.check_depth(n_steps if n_steps is not None else system.n_steps)
    chosen = [p for p in system.shared_parameters(depth) if _comparable(p, variants)]
    sums = {name: {p.name: [[0.0] * 3 for _ in range(p.invocations)] for p in chosen} for name in variants}
    variants = {name: placed(system, weights) for name, weights in variants.items()}
    batches = list(tokens.take(0, N_PROMPTS).batches(batch_size, seed))
    progress.start("by layer", len(batches) * (len(variants) + 1), "rollouts")
    for batch in batches:
        plain = _rows(system, chosen, batch, depth)
        progress.advance()
        for name, weights in variants.items():
            with Replaced(system, weights) as changed:
                other = _rows(changed, chosen, batch, depth)
            for p in chosen:
                _add(sums[name][p.name], system, p, weights, plain[p.name], other[p.name])
            progress.advance()
    progress.stop()
    return {name: _ratios(of, variants[name]) for name, of in sums.items()}


def _ratios(sums: Mapping[str, list[list[float]]], weights: Weights) -> LayerErrors:
    moved = {layer: [_ratio(moved, of) for moved, _, of in calls] for layer, calls in sums.items()}
    added = {layer: [_ratio(added, of) for _, added, of in sums[layer]] for layer in sums if layer in weights}
    return {"moved": moved, "own": added}


def _comparable(p: SharedParameter, variants: Mapping[str, Weights]) -> bool:
    # A quantized rollout may route other tokens to an expert, so its rows cannot be compared.
    plain = p.orientation != "table" and not p.routed_in
    return plain and any(p.name in weights for weights in variants.values())


def _rows(
    system: LoopedSystem, parameters: Sequence[SharedParameter], batch: Batch, n_steps: int
) -> dict[str, list[Tensor]]:
    """Collect some input rows of every call of every parameter in one rollout."""
    import torch  # lazy: loopq imports without torch

    rows_of: dict[str, list[Tensor]] = {p.name: [] for p in parameters}

    def keep(parameter: SharedParameter, step: int, rows: Tensor) -> None:
        picked = torch.linspace(0, rows.shape[0] - 1, min(N_ROWS, rows.shape[0]), device=rows.device).long()
        rows_of[parameter.name].append(rows[picked])

    with Observer(system, parameters, keep, check_finite=False) as observer, observer.rollout(batch):
        system.rollout(batch, n_steps)
    return rows_of


def _add(
    sums: list[list[float]],
    system: LoopedSystem,
    parameter: SharedParameter,
    weights: Weights,
    plain: Sequence[Tensor],
    other: Sequence[Tensor],
) -> None:
    """Add the squared errors and squared outputs of every call of one layer, in one product for all calls."""
    import torch  # lazy: loopq imports without torch

    stored = parameter_of(system.model, parameter).detach()
    weight = stored.float()
    changed = weight
    if parameter.name in weights:
        # Rounded to the model's own dtype.
        changed = torch.as_tensor(weights[parameter.name]).to(stored.device, stored.dtype).float()
    weight, changed = parameter.matrix(weight).T, parameter.matrix(changed).T
    sizes = [len(rows) for rows in plain]
    if len(plain) != len(sums) or sizes != [len(rows) for rows in other]:
        # A loop that ended by itself: errors of the same step do not exist.
        sums[:] = [[math.nan] * 3 for _ in sums]
        return
    x, y = torch.cat(list(plain)).float(), torch.cat(list(other)).float()
    out = x @ weight
    parts = [part.split(sizes) for part in (y @ changed - out, x @ (changed - weight), out)]
    for step, entry in enumerate(sums):
        for i, part in enumerate(parts):
            entry[i] += float(part[step].double().square().sum())


def _ratio(error: float, of: float) -> float | None:
    if not math.isfinite(error):
        return None
    return math.sqrt(error / of) if of > 0 else 0.0
