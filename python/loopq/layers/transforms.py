"""Changes of a layer's input basis: block rotations and channel scales, compensated in the weight.

A layer computes W x. With an invertible T, W x = (W T^-1) (T x). loopq quantizes W T^-1, which can spread outliers.
T is applied to the input at run time, or folded back into the dequantized weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loopq.errors import ConfigError
from loopq.settings.declare import Settings, setting

Matrix = NDArray[np.float64]
#: Kinds of a description. Hadamard matrices without signs are read from files of earlier releases, and not made.
KINDS = ("signed", "random", "hadamard")
#: Rotation that is chosen for each layer by a trial, and the block sizes of its candidate.
AUTO = "auto"
LEAST_BLOCK, LARGEST_BLOCK = 16, 128


class Transform(Protocol):
    """A change of input basis."""

    def fold(self, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """W T^-1, the weight for the transformed input."""

    def unfold(self, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """W' T, the weight for the original input."""

    def conjugate(self, hessian: Matrix) -> Matrix:
        """T H T^T, the Hessian of the transformed input."""

    def describe(self) -> dict[str, Any]:
        """Return plain data that, with `arrays`, restores the transform."""

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return the arrays of the transform by name. They are empty if `describe` is complete."""


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, int(n**0.5) + 1))


def _residues(q: int) -> NDArray[np.int8]:
    """Quadratic character of every pair difference: chi(i - j) mod q, shape (q, q)."""
    character = -np.ones(q, dtype=np.int8)
    character[0] = 0
    character[np.unique(np.arange(1, q, dtype=np.int64) ** 2 % q)] = 1
    residues: NDArray[np.int8] = character[np.subtract.outer(np.arange(q), np.arange(q)) % q]
    return residues


def _paley(n: int) -> NDArray[np.int8] | None:
    """Paley's constructions for prime fields, of a multiple of 4: I if n - 1 = 3 mod 4, II if n / 2 - 1 = 1 mod 4."""
    if _is_prime(n - 1) and (n - 1) % 4 == 3:
        core = _residues(n - 1)
        skew = np.ones((n, n), dtype=np.int8)
        skew[0, 0] = 0
        skew[1:, 0] = -1
        skew[1:, 1:] = core
        return skew + np.eye(n, dtype=np.int8)
    if _is_prime(n // 2 - 1) and (n // 2 - 1) % 4 == 1:
        half = n // 2
        conference = np.ones((half, half), dtype=np.int8)
        conference[0, 0] = 0
        conference[1:, 1:] = _residues(half - 1)
        plus = np.array([[1, 1], [1, -1]], dtype=np.int8)
        minus = np.array([[1, -1], [-1, -1]], dtype=np.int8)
        return np.kron(conference, plus) + np.kron(np.eye(half, dtype=np.int8), minus)
    return None


@cache
def hadamard_factors(n: int) -> tuple[NDArray[np.int8], ...] | None:
    """Hadamard matrices, int8, whose Kronecker product in this order is `hadamard(n)`; None if that is None."""
    if n & (n - 1) == 0:
        return (np.array([[1, 1], [1, -1]], dtype=np.int8),) * (n.bit_length() - 1)
    if n % 4:
        return None
    if (paley := _paley(n)) is not None:
        return (paley,)
    for factor in range(n // 2, 1, -1):
        if n % factor == 0:
            first, second = hadamard_factors(factor), hadamard_factors(n // factor)
            if first is not None and second is not None:
                return first + second
    return None


@cache
def hadamard(n: int) -> NDArray[np.int8] | None:
    """Return a Hadamard matrix: entries +-1, rows orthogonal.

    Returns
    -------
    ndarray, int8, shape (n, n), or None
        Sylvester's matrix for powers of 2, otherwise Paley's over a prime field. Otherwise it is a Kronecker product of
        two smaller ones, largest factor first. None if none of these exists.

    Examples
    --------
    >>> [hadamard(n) is not None for n in (1, 2, 12, 20, 160, 320, 5280, 6, 92)]
    [True, True, True, True, True, True, True, False, False]
    """
    factors = hadamard_factors(n)
    return None if factors is None else reduce(np.kron, factors, np.ones((1, 1), dtype=np.int8))


def random_orthogonal(n: int, seed: int) -> Matrix:
    """Orthogonal matrix of the QR factorisation of a Gaussian one, with unique signs, float64, shape (n, n)."""
    q, r = np.linalg.qr(np.random.default_rng([seed, n]).standard_normal((n, n)))
    return np.asarray(q * np.sign(np.diag(r)))


@dataclass(frozen=True)
class Rotation:
    """Block-diagonal rotation of a layer's input (Li, App. D).

    Parameters
    ----------
    dim : int
        Input columns. All of them are rotated.
    kind : {"signed", "random", "hadamard"}
        Normalised Hadamard matrix with random signs of its columns, a random orthogonal matrix, or a Hadamard matrix
        without signs. Without them a constant input goes into one column, and the rest falls below the sums' precision.
    block : int
        Columns that are rotated together. A shorter last block has a matrix of its size. If no Hadamard matrix of a
        size is found, a random one is used, and `describe` says so.
    seed : int
        Seed of signs and random matrices.
    """

    dim: int
    kind: str
    block: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"rotation must be one of {', '.join(KINDS)}; got {self.kind!r}")
        if self.block < 1 or self.dim < 1:
            raise ConfigError(f"rotation: block and dim must be at least 1; got {self.block} and {self.dim}")

    def sizes(self) -> list[int]:
        """Sizes of the blocks."""
        whole, rest = divmod(self.dim, self.block)
        return [self.block] * whole + ([rest] if rest else [])

    def matrix(self, size: int) -> Matrix:
        """Rotation of a block of the given size, float64, shape (size, size)."""
        return _block(self.kind, size, self.seed)

    def factors(self, size: int) -> list[Matrix]:
        """Matrices whose Kronecker product in this order is `matrix(size)`: neighbours are joined up to 64 rows."""
        return _factors(self.kind, size, self.seed)

    def _right(self, rows: NDArray[Any], transposed: bool) -> Matrix:
        out = np.empty(rows.shape, dtype=np.float64)
        whole = self.dim - self.dim % self.block
        for start, stop, size in ((0, whole, self.block), (whole, self.dim, self.dim - whole)):
            if stop > start:
                r = self.matrix(size)
                blocks = rows[:, start:stop].astype(np.float64).reshape(-1, size)
                out[:, start:stop] = (blocks @ (r.T if transposed else r)).reshape(len(rows), -1)
        return out

    def fold(self, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """W R^T, float32."""
        return self._right(weight, True).astype(np.float32)

    def unfold(self, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """W' R, float32."""
        return self._right(weight, False).astype(np.float32)

    def conjugate(self, hessian: Matrix) -> Matrix:
        """R H R^T, exactly symmetric."""
        half = self._right(hessian, True)
        both = self._right(np.ascontiguousarray(half.T), True)
        return np.ascontiguousarray((both + both.T) / 2)

    def describe(self) -> dict[str, Any]:
        """Return kind, sizes and seed, and the kind of matrix for each size."""
        matrices = {
            str(size): "random" if self.kind == "random" or hadamard(size) is None else "hadamard"
            for size in sorted(set(self.sizes()))
        }
        return {
            "type": "rotation",
            "kind": self.kind,
            "dim": self.dim,
            "block": self.block,
            "seed": self.seed,
            "made": matrices,
        }

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return no arrays: a rotation is rebuilt from its description."""
        return {}


@cache
def _block(kind: str, size: int, seed: int) -> Matrix:
    whole: Matrix = np.ones((1, 1))
    for factor in _factors(kind, size, seed):
        whole = np.asarray(np.kron(whole, factor), dtype=np.float64)
    return whole


@cache
def _factors(kind: str, size: int, seed: int) -> list[Matrix]:
    found = None if kind == "random" else hadamard_factors(size)
    if found is None:
        return [random_orthogonal(size, seed)]
    joined: list[NDArray[np.int8]] = []
    for factor in found or (np.ones((1, 1), dtype=np.int8),):
        if joined and len(joined[-1]) * len(factor) <= 64:
            joined[-1] = np.kron(joined[-1], factor)
        else:
            joined.append(factor)
    draw = np.random.default_rng([seed, size])
    signs = [draw.choice([-1, 1], len(m)) if kind == "signed" else 1 for m in joined]
    return [m * sign / np.sqrt(len(m)) for m, sign in zip(joined, signs, strict=True)]


@dataclass(frozen=True)
class ChannelScale:
    """Channel scaling: input j is divided by s_j, its weight column multiplied (AWQ: Lin et al., arXiv:2306.00978).

    Parameters
    ----------
    scale : ndarray, float32, shape (in_features,)
        s, positive.
    """

    scale: NDArray[np.float32] = field(repr=False)

    def fold(self, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """W diag(s), float32."""
        return np.asarray(weight * self.scale, dtype=np.float32)

    def unfold(self, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """W' diag(s)^-1, float32."""
        return np.asarray(weight / self.scale, dtype=np.float32)

    def conjugate(self, hessian: Matrix) -> Matrix:
        """diag(s)^-1 H diag(s)^-1."""
        inverse = 1.0 / self.scale.astype(np.float64)
        return np.asarray(hessian * inverse * inverse[:, None])

    def describe(self) -> dict[str, Any]:
        """The type."""
        return {"type": "channel_scale"}

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """The scale s."""
        return {"input_scale": self.scale}


def from_description(data: Mapping[str, Any], arrays: Mapping[str, NDArray[np.float32]]) -> Transform:
    """Rebuild a transform from the results of `describe` and `arrays`.

    Raises
    ------
    ConfigError
        The type is unknown.
    """
    kind = data.get("type")
    if kind == "rotation":
        return Rotation(int(data["dim"]), str(data["kind"]), int(data["block"]), int(data["seed"]))
    if kind == "channel_scale":
        return ChannelScale(arrays["input_scale"])
    raise ConfigError(f"input transform of unknown type {kind!r}; this file needs a newer loopq")


@dataclass(frozen=True)
class RotationConfig(Settings):
    """Rotation of a layer's input.

    Parameters
    ----------
    kind : str
        Rotation: auto | none | hadamard | hadamard:SIZE | random | random:SIZE. It rotates blocks of SIZE input
        columns, or one block as wide as the layer, at run time. The weight is rotated to compensate.
        `auto` tries blocks as wide as a group for each layer that only loopq reads, with uneven levels or on a trellis,
        and keeps them where they lower its loss.
    seed : int
        Seed of random rotations, and of the signs of Hadamard matrices.
    """

    kind: str = setting(AUTO, metavar="KIND")
    seed: int = setting(0, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, _, size = self.kind.partition(":")
        if self.kind not in ("none", AUTO) and (
            kind not in ("hadamard", "random")
            or (":" in self.kind and not re.fullmatch("[1-9][0-9]{0,8}", size))
        ):
            raise ConfigError(
                f"rotation must be auto, none, hadamard, hadamard:SIZE or random:SIZE; got {self.kind!r}"
            )

    def of(self, dim: int, group_size: int) -> Rotation | None:
        """Return the rotation of a layer of `dim` input columns, or None.

        For "auto" it is the candidate: Hadamard blocks, the largest power of two that divides `dim` and is no wider
        than a group. Rows with one scale get blocks of 64.
        """
        if self.kind == AUTO:
            widest = min(group_size if group_size > 0 else 64, LARGEST_BLOCK)
            block = min(dim & -dim, 1 << (widest.bit_length() - 1))
            return Rotation(dim, "signed", block, self.seed) if block >= LEAST_BLOCK else None
        kind, _, size = self.kind.partition(":")
        made = {"hadamard": "signed"}.get(kind, kind)
        return None if kind == "none" else Rotation(dim, made, min(int(size or dim), dim), self.seed)
