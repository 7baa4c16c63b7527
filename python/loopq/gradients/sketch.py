"""Products of the loop's gradients with thin matrices, in the backward pass, without storing any weight's gradient.

X_t holds the rows that a layer reads at step t, and G_t the gradient of its output. The gradient of its weight is
g = sum_t G_t^T X_t. Therefore g Om = sum_t G_t^T (X_t Om) and g^T Y = sum_t X_t^T (G_t Y). If Om Om^T is H'^-1 on
average, (g Om)(g Om)^T is g H'^-1 g^T on average. If Y Y^T is A'^-1, (g^T Y)(g^T Y)^T is g^T A'^-1 g.
"""

from __future__ import annotations

import copy
import functools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from loopq.calibrate.hooks import InputKey, input_key
from loopq.errors import NonFiniteError
from loopq.quantizers.loop_metric import ridged
from loopq.quantizers.task import Pool, Task


@functools.lru_cache(maxsize=16)
def _wave(n: int, device: torch.device) -> Tensor:
    """The second row of the Hartley transform. All entries are taken from it."""
    angles = np.arange(n) * (2.0 * np.pi / n)
    return torch.from_numpy((np.cos(angles) + np.sin(angles)) / np.sqrt(n)).to(device)


def _hartley(n: int, columns: NDArray[np.int64], device: torch.device) -> Tensor:
    """Some columns of the Hartley transform, in float64. It is orthogonal for every n."""
    chosen = torch.from_numpy(np.ascontiguousarray(columns)).to(device)
    return _wave(n, device)[torch.outer(torch.arange(n, device=device), chosen) % n]


@functools.lru_cache(maxsize=16)
def _whole(n: int, device: torch.device) -> Tensor:
    """All columns of the Hartley transform."""
    return _hartley(n, np.arange(n), device)


def _typed(thin: Tensor, like: Tensor) -> Tensor:
    """Round a thin matrix to the type of rows in bfloat16, which processors multiply several times as fast."""
    return thin.to(torch.bfloat16) if like.dtype == torch.bfloat16 else thin


def _times(rows: Tensor, thin: Tensor) -> Tensor:
    """Multiply rows by a thin matrix of `_typed`."""
    return rows.to(thin.dtype) @ thin


def _signs(rng: np.random.Generator, n: int, device: torch.device) -> Tensor:
    return torch.from_numpy(rng.choice((-1.0, 1.0), n)).to(device)


def root(
    matrix: NDArray[np.float64], share: float, seed: Sequence[int], n_columns: int, device: torch.device
) -> Tensor:
    """Columns of a root of the inverse of a damped matrix, mixed so that all columns are equally informative.

    Parameters
    ----------
    matrix : ndarray, float64, shape (n, n)
        Positive semi-definite matrix. It is not changed.
    share : float
        Damping, as in `ridged`.
    seed : sequence of int
        Seed of signs and of the order of columns.
    n_columns : int
        Number of returned columns. It is at most n.
    device : torch.device
        Device of the computation.

    Returns
    -------
    Tensor, float32, shape (n, n_columns)
        With all n columns C, C C^T is the inverse. With fewer, n / n_columns times C C^T is the inverse in expectation.

    Notes
    -----
    C = D L^-T diag(signs) F P with D M D = L L^T of unit diagonal. F is the Hartley transform and P a permutation.
    Because of the unit diagonal, scaling a channel costs no digits.
    """
    n = len(matrix)
    rng = np.random.default_rng(list(seed))
    signs = _signs(rng, n, device)
    mixed = signs[:, None] * _hartley(n, rng.permutation(n)[:n_columns], device)
    damped = torch.from_numpy(ridged(matrix, share)).to(device)
    unit = 1.0 / damped.diagonal().sqrt()
    lower = torch.linalg.cholesky(damped * unit * unit[:, None])
    columns = torch.linalg.solve_triangular(lower.mT, mixed, upper=True)
    return (unit[:, None] * columns).float()


def seed_of(name: str, seed: int, side: int) -> list[int]:
    """Seed of a layer's sketch on one side."""
    return [seed, zlib.crc32(name.encode()), side]


def cycled(n: int, n_columns: int, rank: int, number: int) -> tuple[list[int], float]:
    """Columns of the `number`-th gradient, and their scale. Each gradient takes the next `rank` columns in a circle."""
    rank = min(rank, n_columns)
    return [(number * rank + i) % n_columns for i in range(rank)], (n / rank) ** 0.5


def _add_square(to: Tensor, part: Tensor) -> None:
    """Add P P^T to a sum in float32, where P may be in bfloat16: a product rounded to bfloat16 is not semidefinite."""
    part = part.to(to.dtype)
    to.addmm_(part, part.T)


Kept = tuple[Tensor, ...]


@dataclass(frozen=True)
class Sketch:
    """Settings of the thin matrices.

    Parameters
    ----------
    roots : mapping of str to Tensor
        Columns of H'^-1/2 by parameter name. Layers with the same input share one object.
    rank : int
        Columns of a thin matrix.
    block : int
        Outputs of a block. The last block may be smaller.
    seed : int
        Seed of signs and of the order of columns.
    n_draws : int
        Draws of a prompt. Each draw has its own Y.
    pools : mapping of str to Pool
        Sums that experts share, by parameter name. Experts have signs of their own, as blocks of one wide layer have.
    """

    roots: Mapping[str, Tensor]
    rank: int
    block: int
    seed: int
    n_draws: int
    pools: Mapping[str, Pool] = field(default_factory=dict)


class Side(ABC):
    """One side of the sums: it keeps part of a layer's input until the gradient of the output arrives."""

    #: Attributes of the current gradient.
    _of_gradient: ClassVar[tuple[str, ...]] = ("_products", "_last", "_mixes", "_thin")

    def __init__(self) -> None:
        self._products: dict[str, Kept] = {}
        self._waiting: list[dict[str, Kept]] | None = None

    def twin(self) -> Side:
        """Return a copy for a prompt that runs beside others. Its products wait for `merge`."""
        other = copy.copy(self)
        vars(other).update({name: {} for name in self._of_gradient}, _waiting=[])
        return other

    def merge(self, twin: Side) -> None:
        """Add all gradients of a twin to the sums."""
        for gradient in twin._waiting or ():
            for name, products in gradient.items():
                self.add(name, products)

    @abstractmethod
    def begin(self, prompt: int, draw: int) -> None:
        """Choose the thin matrices of a prompt (draw 0, before its rollout) and of a draw."""

    @abstractmethod
    def keep(self, task: Task, rows: Tensor) -> Kept:
        """Return the part of a call's rows (n_rows, in_features) that is kept until its gradient arrives."""

    @abstractmethod
    def products(self, name: str, kept: Kept, gradient: Tensor) -> Kept:
        """Multiply the kept part with the gradient (n_rows, out_features) of a call."""

    @abstractmethod
    def add(self, name: str, products: Kept) -> None:
        """Add the products of one gradient, of all its steps, to the sums."""

    def key(self, name: str) -> str:
        """Name of the sums of a layer."""
        return name

    def take(self, name: str, kept: Kept, gradient: Tensor) -> None:
        """Add the products of one call."""
        key = self.key(name)
        new, old = self.products(name, kept, gradient), self._products.get(key)
        self._products[key] = (
            tuple(x.float() if x.dtype == torch.bfloat16 else x for x in new)
            if old is None
            else tuple(x.add_(y) for x, y in zip(old, new, strict=True))
        )

    def finish(self, n_gradients: int) -> None:
        """Convert the sums of all gradients at the end. The default does nothing."""
        return

    def end(self) -> None:
        """Add the products of a backward pass to the sums.

        Raises
        ------
        NonFiniteError
            A gradient is NaN or infinite.
        """
        # One check for all layers waits only once for the device.
        finite = [
            torch.stack([torch.isfinite(x).all() for x in parts]).all() for parts in self._products.values()
        ]
        if finite and not bool(torch.stack(finite).all()):
            name = next(n for n, known in zip(self._products, finite, strict=True) if not bool(known))
            raise NonFiniteError(f"layer {name}: the loop's gradient is NaN or infinite")
        done, self._products = self._products, {}
        if self._waiting is not None:
            self._waiting.append(done)
            return
        for name, products in done.items():
            self.add(name, products)


class Reached(Side):
    """Record the layers that receive a gradient, without products."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def begin(self, prompt: int, draw: int) -> None:
        """Do nothing."""

    def keep(self, task: Task, rows: Tensor) -> Kept:
        """Return nothing."""
        return ()

    def products(self, name: str, kept: Kept, gradient: Tensor) -> Kept:
        """Return the sum of the gradient, for the NaN test."""
        return (gradient.sum(),)

    def add(self, name: str, products: Kept) -> None:
        """Record the layer."""
        self.names.add(name)


class Outputs(Side):
    """Energy of each output, diag(g Om Om^T g^T). Layers with one input share one Om.

    Parameters
    ----------
    sums : dict
        Energies by parameter name. They are updated.
    sketch : Sketch
        Settings of Om.
    """

    def __init__(self, sums: dict[str, Tensor], sketch: Sketch) -> None:
        super().__init__()
        self._sums, self.sketch = sums, sketch
        self._prompt = 0
        self._last: dict[int, tuple[InputKey, Tensor, Tensor]] = {}
        self._mixes: dict[int, Tensor] = {}

    def begin(self, prompt: int, draw: int) -> None:
        """As in `Side`. All draws of a prompt share one Om, so X_t Om is computed once."""
        if prompt != self._prompt:
            self._mixes.clear()
        self._prompt = prompt
        self._last.clear()

    def side(self, name: str) -> str:
        """The side that experts share, if there is one."""
        return self.sketch.pools[name].side if name in self.sketch.pools else ""

    def key(self, name: str) -> str:
        """As in `Side`. Experts that write to one output share its energies."""
        return self.sketch.pools[name].name if self.side(name) == "outputs" else name

    def keep(self, task: Task, rows: Tensor) -> Kept:
        """Return X_t Om. It is computed once for the layers that read one input."""
        whole = self.sketch.roots[task.name]
        key, last = input_key(rows), self._last.get(id(whole))
        if last is None or last[0] != key:
            # The rows stay alive, so no other tensor can get their address.
            if id(whole) not in self._mixes:
                chosen, scale = cycled(whole.shape[0], whole.shape[1], self.sketch.rank, self._prompt)
                self._mixes[id(whole)] = _typed(whole[:, chosen] * scale, rows)
            last = self._last[id(whole)] = key, rows, _times(rows, self._mixes[id(whole)])
        return (last[2],)

    def products(self, name: str, kept: Kept, gradient: Tensor) -> Kept:
        """G_t^T (X_t Om)."""
        return (_times(gradient.T, kept[0]),)

    def add(self, name: str, products: Kept) -> None:
        """Add the squares of the rows."""
        energy = products[0].square().sum(1)
        self._sums[name] = self._sums[name] + energy if name in self._sums else energy


class Both(Outputs):
    """A_b += (g Om)_b (g Om)_b^T and S_g += (g^T Y)(g^T Y)^T, b the blocks of outputs.

    Parameters
    ----------
    left, right : dict
        Sums by parameter name. They are updated.
    spread : dict
        Sum over gradients of the squared size of the couplings of (g Om)_b (g Om)_b^T. It is by parameter name and
        block, in units of `scales`.
    scales : mapping
        Factor of each output in Y. The key is the parameter name.
    sketch : Sketch
        Settings of Om and Y.

    Notes
    -----
    Y_b = diag(scale) diag(signs) F P diag(signs'). F is the Hartley transform; each gradient takes other columns of it.
    The row signs belong to a layer and the column signs to a gradient. Products between blocks therefore vanish on
    average.
    """

    def __init__(
        self,
        left: dict[str, list[Tensor]],
        right: dict[str, Tensor],
        spread: dict[str, Tensor],
        scales: Mapping[str, Tensor],
        sketch: Sketch,
    ) -> None:
        super().__init__({}, sketch)
        self.left, self.right, self.spread, self._scales = left, right, spread, scales
        self._number = 0
        self._thin: dict[str, Tensor] = {}
        self._drawn: dict[str, tuple[Tensor, NDArray[np.int64]]] = {}

    def begin(self, prompt: int, draw: int) -> None:
        super().begin(prompt, draw)
        self._number = prompt * self.sketch.n_draws + draw
        self._thin.clear()

    def key(self, name: str) -> str:
        """As in `Side`. Experts share one side, and have no sums on the other."""
        return self.sketch.pools[name].name if name in self.sketch.pools else name

    def keep(self, task: Task, rows: Tensor) -> Kept:
        """Return X_t Om, and X_t itself, each for its side."""
        mixed = () if self.side(task.name) == "inputs" else super().keep(task, rows)
        return mixed if self.side(task.name) == "outputs" else (*mixed, rows)

    def products(self, name: str, kept: Kept, gradient: Tensor) -> Kept:
        """G_t^T (X_t Om), and X_t^T (G_t Y), each for its side."""
        left = () if self.side(name) == "inputs" else super().products(name, kept, gradient)
        if self.side(name) == "outputs":
            return left
        if name not in self._thin:
            self._thin[name] = _typed(self._choose(name), gradient)
        return *left, _times(kept[-1].T, _times(gradient, self._thin[name]))

    def end(self) -> None:
        """As in `Side`. Sums over steps are rounded to the type of their parts."""
        for name, thin in self._thin.items():
            if (key := self.key(name)) in self._products:
                self._products[key] = tuple(x.to(thin.dtype) for x in self._products[key])
        super().end()

    def add(self, name: str, products: Kept) -> None:
        """Add to every block, and to the matrix between inputs."""
        if self.side(name) != "inputs":
            self._add_left(name, products[0])
        if self.side(name) != "outputs":
            right = products[-1]
            if name not in self.right:
                self.right[name] = right.new_zeros(len(right), len(right), dtype=torch.float32)
            _add_square(self.right[name], right)

    def _add_left(self, name: str, left: Tensor) -> None:
        parts = left.split(self.sketch.block)
        if name not in self.left:
            zeros = functools.partial(left.new_zeros, dtype=torch.float32)
            self.left[name] = [zeros(len(p), len(p)) for p in parts]
            self.spread[name] = zeros(len(parts))
        blocks, spread = self.left[name], self.spread[name]
        for i, (block, part) in enumerate(zip(blocks, parts, strict=True)):
            _add_square(block, part)
            # The squared size of the couplings of P P^T is that of P^T P minus the squares of P P^T's diagonal.
            unit = _typed(part * self._scales[name].split(self.sketch.block)[i][:, None], part)
            spread[i] += (unit.T @ unit).float().square().sum() - unit.float().square().sum(1).square().sum()

    def finish(self, n_gradients: int) -> None:
        """Shrink the couplings between outputs by their share of sampling noise.

        C_n are the couplings of one gradient and C is their mean. The noise in C is estimated by v = (sum ||C_n||^2 - n
        ||C||^2) / (n (n - 1)). C (1 - v / ||C||^2) has the least expected error (Ledoit and Wolf, J. Multivariate
        Analysis 88, 2004). A single gradient gives no estimate, so no coupling is kept.
        """
        for name, blocks in self.left.items():
            for scale, block, spread in zip(
                self._scales[name].split(self.sketch.block), blocks, self.spread[name].double(), strict=True
            ):
                unit = (block * scale * scale[:, None]).double()
                size = unit.square().sum() - unit.diagonal().square().sum()
                noise = (spread * n_gradients / size - 1) / max(n_gradients - 1, 1)
                keep = (1 - noise.clamp(0, 1)) if n_gradients > 1 and size > 0 else 0.0
                diagonal = block.diagonal().clone()
                block.mul_(keep).diagonal().copy_(diagonal)

    def _choose(self, name: str) -> Tensor:
        scale, block = self._scales[name], self.sketch.block
        n, device = len(scale), scale.device
        if name not in self._drawn:
            of_layer = np.random.default_rng(seed_of(name, self.sketch.seed, 1))
            self._drawn[name] = scale * _signs(of_layer, n, device).float(), of_layer.permutation(block)
        signed, order = self._drawn[name]
        of_gradient = np.random.default_rng([*seed_of(name, self.sketch.seed, 2), self._number])
        rank, whole = min(self.sketch.rank, n, block), n - n % block
        parts = []
        # Whole blocks have the same columns, but their own signs. The last block may be shorter.
        for first, end, size in ((0, whole, block), (whole, n, n - whole)):
            if first == end:
                continue
            chosen, factor = cycled(size, size, rank, self._number)
            signs = _signs(of_gradient, len(chosen) * ((end - first) // size), device).float()
            columns = torch.from_numpy(order[order < size][chosen]).to(device)
            part = (_whole(size, device)[:, columns] * factor).float() * signs.reshape(-1, 1, len(chosen))
            parts.append(nn.functional.pad(part.reshape(end - first, -1), (0, rank - len(chosen))))
        return signed[:, None] * torch.cat(parts)
