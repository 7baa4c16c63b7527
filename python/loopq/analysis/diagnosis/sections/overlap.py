"""Overlap of eigenspaces between steps and between seeds, with the overlap expected by chance (Li, App. O)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.exposure import adapter_output_ratio
from loopq.analysis.diagnosis.rollouts import trace
from loopq.analysis.diagnosis.sections import SECTIONS, Section
from loopq.errors import ConfigError
from loopq.storage.schema import Object
from loopq.systems.stepwise import single_steps

if TYPE_CHECKING:
    from loopq.calibrate.data import TokenSet
    from loopq.systems.base import LoopedSystem


Floats = NDArray[np.float64]


def leading_space(moment: Floats, k: int) -> Floats:
    """Top-k eigenvectors of a symmetric matrix as float64 (dim, k)."""
    if not 1 <= k <= len(moment):
        raise ConfigError(f"k must lie between 1 and the dimension {len(moment)}; got {k}")
    _, vectors = np.linalg.eigh(moment)
    space: Floats = vectors[:, ::-1][:, :k]
    return space


def overlap(a: Floats, b: Floats, k: int) -> float:
    """Mean squared cosine of the principal angles between two top-k eigenspaces (Li, App. O).

    Parameters
    ----------
    a, b : float64 ndarrays of shape (dim, dim)
        Uncentred second moments.
    k : int
        Dimension of the spaces.

    Returns
    -------
    float
        ||U^T V||_F^2 / k: 1 for equal spaces, `chance(k, dim)` in expectation for independent ones.
    """
    if a.shape != b.shape:
        raise ConfigError(f"both moments need the same shape; got {a.shape} and {b.shape}")
    return float(np.linalg.norm(leading_space(a, k).T @ leading_space(b, k)) ** 2 / k)


def chance(k: int, dim: int) -> float:
    """Expected overlap of two random k-dimensional spaces: k / dim."""
    return k / dim


def state_moments(
    system: LoopedSystem, tokens: TokenSet, n_steps: int, steps: Sequence[int], seed: int, batch_size: int = 8
) -> dict[int, Floats]:
    """Uncentred second moments of the states that enter the given steps, float64 (width, width)."""
    moments: dict[int, Floats] = {}
    for batch in tokens.batches(batch_size, seed):
        run = trace(system, batch, n_steps, read=())
        for step in steps:
            rows = run.states[step].double().flatten(0, -2)
            moments[step] = moments.get(step, 0.0) + (rows.T @ rows).cpu().numpy()
    return moments


def subspace_survey(
    moments: Mapping[int, Mapping[int, Floats]], ks: Sequence[int] = (32, 64)
) -> list[Object]:
    """Overlap of consecutive steps for every seed, and of every pair of seeds at each step.

    Parameters
    ----------
    moments : mapping of seed to mapping of step to ndarray
        Second moments of the state (`state_moments`).
    ks : sequence of int
        Dimensions of the spaces. Those above half the width are left out because chance alone gives half the overlap.

    Returns
    -------
    list of dict
        Entries `between`, `k`, `overlap`, `chance` and `dim`.
    """
    seeds = list(moments)
    steps = sorted(moments[seeds[0]])
    dim = len(moments[seeds[0]][steps[0]])
    pairs: list[tuple[str, Floats, Floats]] = []
    for seed in seeds:
        for a, b in itertools.pairwise(steps):
            pairs.append((f"steps {a} and {b}, seed {seed}", moments[seed][a], moments[seed][b]))
    for first, second in itertools.combinations(seeds, 2):
        for step in steps:
            pairs.append(
                (f"seeds {first} and {second}, step {step}", moments[first][step], moments[second][step])
            )
    return [
        {"between": label, "k": k, "overlap": overlap(a, b, k), "chance": chance(k, dim), "dim": dim}
        for k in ks
        if 2 * k <= dim
        for label, a, b in pairs
    ]


def overlaps(context: Context) -> Object:
    """Overlap of state subspaces between steps and seeds, and the exposed layers' output size (Li, App. O)."""
    seed, batch_size = context.execution.seed, context.execution.batch_size
    seeds = (seed, seed + 1) if context.system.state_is_random else (seed,)
    last = context.n_steps - 1
    # A state that grows is empty at first.
    steps = sorted({min(int(single_steps(context.system).grows), last), last})
    moments = {
        s: state_moments(context.system, context.tokens, context.n_steps, steps, s, batch_size) for s in seeds
    }
    ratio = {}
    if context.exposed:
        ratio = adapter_output_ratio(
            context.system, context.prompts, context.n_steps, seed=seed, batch_size=batch_size
        )
    return {"overlaps": subspace_survey(moments), "output_ratio": ratio}


def _rollouts(context: Context) -> int:
    return len(context.tokens.sequences) * (2 if context.system.state_is_random else 1)


SECTIONS.register("overlap")(Section(overlaps, 20, loop="the overlap of states", rollouts=_rollouts))
