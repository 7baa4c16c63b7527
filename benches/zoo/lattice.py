"""Whether weights still show an old rounding: ``python -m benches.zoo.lattice FOLDER [FOLDER ...]``.

For each group of 32 weights, `shares` fits a grid of 16 evenly spaced values by least squares, and gives the distance
of each weight to the nearest one in steps. Weights that were rounded once are near it; of other weights the distances
have the distribution that normal numbers have. The command prints the worst matrix of each folder by `gap`, beside
kurtosis and the spread of columns.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file

GROUP, LEVELS = 32, 16
#: Groups of a matrix that are looked at.
SAMPLE = 256
#: Largest code of the first grid of each search: a group need not reach both ends of its sixteen levels.
REACHES = tuple(range(8, LEVELS))


def shares(weights: NDArray[np.float64], rounds: int = 20) -> NDArray[np.float64]:
    """Return distances in steps (groups, 32), from -0.5 to 0.5, of groups (groups, 32) to the grid that fits best."""
    least = weights.min(1, keepdims=True)
    width = np.maximum(weights.max(1, keepdims=True) - least, 1e-30)
    best = np.full(weights.shape, np.inf)
    for reach in REACHES:
        step, start = width / reach, least
        for _ in range(rounds):
            codes = np.clip(np.rint((weights - start) / step), 0, LEVELS - 1)
            middle, mean = codes.mean(1, keepdims=True), weights.mean(1, keepdims=True)
            spread = ((codes - middle) ** 2).sum(1, keepdims=True)
            slope = ((codes - middle) * (weights - mean)).sum(1, keepdims=True) / np.maximum(spread, 1e-30)
            step = np.where(slope > 0, slope, step)
            start = mean - step * middle
        distances = (weights - start) / step - np.clip(np.rint((weights - start) / step), 0, LEVELS - 1)
        nearer = (distances**2).mean(1) < (best**2).mean(1)
        best[nearer] = distances[nearer]
    return best


def groups(weight: NDArray[np.float64], seed: int = 0) -> NDArray[np.float64]:
    """Return groups (at most `SAMPLE`, 32) of a matrix (out, in), drawn by a seed."""
    in_groups = weight.reshape(-1, GROUP)
    places = np.random.default_rng(seed).permutation(len(in_groups))[:SAMPLE]
    return in_groups[places]


def gap(weight: NDArray[np.float64]) -> float:
    """Return Kolmogorov's distance between the sizes of a matrix's `shares` and those of normal numbers."""
    ours, theirs = np.sort(np.abs(shares(groups(weight))).ravel()), _normal()
    at = np.concatenate([ours, theirs])
    counts = (np.searchsorted(x, at, side="right") / len(x) for x in (ours, theirs))
    return float(np.abs(np.subtract(*counts)).max())


@functools.cache
def _normal() -> NDArray[np.float64]:
    numbers = np.random.default_rng(1).standard_normal((4 * SAMPLE, GROUP))
    return np.sort(np.abs(shares(numbers)).ravel())


def kurtosis(weight: NDArray[np.float64]) -> float:
    """Return the fourth moment over the square of the second: 3 of normal numbers."""
    centred = weight - weight.mean()
    return float((centred**4).mean() / (centred**2).mean() ** 2)


def main() -> None:
    """Print a line for each folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    print(
        "| weights | gap, median | largest gap | kurtosis, median | largest | column norms, 99 % over 1 % |"
    )
    print("|---|---|---|---|---|---|")
    for folder in parser.parse_args().folders:
        matrices = [
            values.double().numpy()
            for name, values in load_file(folder / "model.safetensors").items()
            if values.dim() == 2 and "layers" in name
        ]
        gaps, tails = [gap(w) for w in matrices], [kurtosis(w) for w in matrices]
        columns = [
            np.quantile(norms, 0.99) / np.quantile(norms, 0.01)
            for norms in (np.linalg.norm(w, axis=0) for w in matrices)
        ]
        print(
            f"| {folder.name} | {np.median(gaps):.3f} | {max(gaps):.3f} | {np.median(tails):.2f} | {max(tails):.1f} "
            f"| {np.median(columns):.2f} |"
        )


if __name__ == "__main__":
    main()
