"""Eight outputs, or four, of one column by one look-up in a table of lattice points.

2 bits a weight: the 2^16 points of E8 + 1/4 nearest to zero, eight weights a look-up (the lattice of QuIP#: Tseng et
al., arXiv:2402.04396). 3 bits: the 2^12 points of D4 + 1/4 nearest to zero, four weights a look-up. The table belongs
to the format.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from benches.next.sides import Matrix, pivots


@cache
def lattice(bits: int) -> NDArray[np.float32]:
    """The points, brought to unit variance, shape (2^(bits * width), width)."""
    width, reach = (8, 3.4) if bits == 2 else (4, 9.0)
    found = [_shell(width, 0.25, reach)]
    if width == 8:
        found.append(_shell(width, 0.75, reach))
    points = np.concatenate(found)
    norms = np.sum(np.square(points), axis=1)
    count = 1 << bits * width
    assert len(points) >= count
    chosen = points[np.lexsort((*points.T, np.round(norms, 6)))[:count]]
    return np.ascontiguousarray(chosen / np.sqrt(np.mean(np.square(chosen))), dtype=np.float32)


def _shell(width: int, shift: float, reach: float) -> Matrix:
    """Points z + shift with an even sum of whole z, within a radius, half the width at a time."""
    top = int(np.ceil(reach)) + 1
    line = [z for z in range(-top, top + 1) if abs(z + shift) <= reach]
    half = np.array(list(itertools.product(line, repeat=width // 2)), dtype=np.float64)
    size = np.sum(np.square(half + shift), axis=1)
    half, size = half[size <= reach**2], size[size <= reach**2]
    order = np.argsort(size)
    half, size = half[order], size[order]
    least = float(size[0])
    out = []
    for own, left in zip(half, reach**2 - size, strict=True):
        if left < least:
            break
        others = half[: np.searchsorted(size, left, side="right")]
        others = others[(others.sum(axis=1) + own.sum()) % 2 == 0]
        out.append(np.hstack([np.broadcast_to(own, others.shape), others]))
    return np.concatenate(out) + shift


def levels(bits: int) -> NDArray[np.float32]:
    """Whole numbers from -2^(bits-1) to 2^(bits-1) - 1, in steps that suit a normal weight, shape (2^bits, 1)."""
    step = {2: 1.0, 3: 0.6}[bits]
    return (step * np.arange(-(1 << (bits - 1)), 1 << (bits - 1), dtype=np.float32))[:, None]


@dataclass
class Vectors:
    """The table in the metric A between rows; a last block that is short takes the first entries of the points.

    Parameters
    ----------
    left : ndarray, float64, shape (out_features, out_features)
        A.
    points : ndarray, float32, shape (n_points, width)
        The table.
    """

    left: Matrix
    points: NDArray[np.float32]
    _sizes: dict[tuple[int, bytes], tuple[NDArray[np.float32], Matrix]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pivot, self._coupling = pivots(self.left)

    def encode(self, target: Matrix, scale: Matrix) -> Matrix:
        """Return points whose scaled values are near the target, block after block with feedback between them."""
        out, error = np.zeros_like(target), np.zeros_like(target)
        width = self.points.shape[1]
        for first in range(0, len(target), width):
            rows = slice(first, min(first + width, len(target)))
            size, root = self._size(first, rows, scale)
            wanted = target[rows] - np.linalg.solve(
                self._coupling[rows, rows], self._coupling[rows, :first] @ error[:first]
            )
            n = rows.stop - first
            pull = root.T @ (root @ (wanted / scale[rows]))
            score = size - 2 * (self.points[:, :n] @ pull.astype(np.float32))
            out[rows] = self.points[int(np.argmin(score)), :n]
            error[rows] = out[rows] * scale[rows] - target[rows]
        return out

    def _size(self, first: int, rows: slice, scale: Matrix) -> tuple[NDArray[np.float32], Matrix]:
        """|root v|^2 of every point, and root = diag(p)^1/2 R diag(scale), brought near one."""
        key = (first, scale[rows].tobytes())
        if key not in self._sizes:
            root = np.sqrt(self._pivot[rows])[:, None] * self._coupling[rows, rows] * scale[rows]
            root /= np.sqrt(np.mean(np.square(root))) or 1.0
            points = self.points[:, : rows.stop - first]
            self._sizes[key] = np.sum(np.square(points @ root.T.astype(np.float32)), axis=1), root
        return self._sizes[key]
