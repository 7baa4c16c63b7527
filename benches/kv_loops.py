"""Keys and values as differences between loops: `python -m benches.kv_loops MODEL ... --text FILE --fit FILE`.

A model that repeats a stack has keys and values of each loop. The bench replaces those that attention sees by what
codes give back, in PyTorch and on a model in full precision. It prints the KL of the predictions to the model's own,
and its ratio to that of `--kv 4` with a 95 % interval over pieces of the text. A difference is taken to what the codes
of the loop before give back, so errors of codes do not add up. Factors and matrices are fitted to the other file.

Then it prints how far keys and values of a loop are from the loop before, as `benches.kv` does.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import benches.zoo.register  # noqa: F401  registers the classes of the zoo
from benches.kv import kl, likeness, rolled
from loopq.evaluation.stats import bootstrap
from loopq.inference.text import prompt_ids
from loopq.models.load import load_model
from loopq.systems.program import Block

#: Channels that share a scale of 16 bits.
BLOCK = 32
#: Block, loop, and what is kept: keys, values, or the input of both.
Place = tuple[int, int, int]
KEYS, VALUES, INPUT = range(3)
#: Factor and matrix of each head.
Fitted = dict[Place, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Way:
    """How keys and values become codes.

    With ``normal`` the levels are the best for normal numbers and the scale is that of least squares, else they are
    those of `--kv`. From the second loop on, ``before`` subtracts the loop before: as it is ("difference"), or for each
    head times a factor or a matrix. Each block of channels has a bit that says if that is smaller. ``more`` bits are
    added by loop. With ``inputs`` the input of both is kept, and keys and values are computed from it.
    """

    bits: int
    normal: bool = False
    before: str = ""
    more: tuple[int, ...] = ()
    inputs: bool = False

    def at(self, loop: int) -> int:
        """Bits of a number at a loop."""
        return self.bits + (self.more[loop] if self.more else 0)

    def stored(self, again: float, share: float) -> float:
        """Bits of a key or value with scales and choices.

        Of blocks that run, ``again`` ran before. An input has ``share`` times as many numbers as keys and values.
        """
        return (self.bits + (16 + (again if self.before else 0)) / BLOCK) * (share if self.inputs else 1)

    def __str__(self) -> str:
        parts = ["input" if self.inputs else "", "normal levels" if self.normal else "", self.before]
        shift = "bits by loop " + " ".join(str(self.bits + more) for more in self.more) if self.more else ""
        return ", ".join(part for part in (*parts, shift) if part) or "`--kv`"


def ways(n_loops: int, all_loop: bool, inputs: bool) -> list[Way]:
    """Those that are compared. The first is `--kv 4`."""
    every = [Way(bits) for bits in (4, 3, 2)] + [Way(bits, before="difference") for bits in (4, 3, 2)]
    every.append(Way(2, normal=True))
    every += [Way(bits, True, before) for before in ("factor", "matrix") for bits in (4, 3, 2)]
    if all_loop:
        middle = [0] * (n_loops - 2)
        shifts = ((1, *middle, -1), (-1, *middle, 1))
        every += [Way(2, True, before, more) for before in ("factor", "matrix") for more in shifts]
    if inputs:
        every += [Way(4, inputs=True), Way(4, True, inputs=True)]
        every += [Way(bits, True, "factor", inputs=True) for bits in (4, 3)]
        every.append(Way(3, True, "matrix", inputs=True))
    return every


@functools.cache
def levels_of(bits: int) -> Tensor:
    """Levels with the least squared error for normal numbers of variance 1 (Lloyd's iteration on quantiles)."""
    x = torch.special.ndtri((torch.arange(2**14, dtype=torch.float64) + 0.5) / 2**14)
    levels = torch.special.ndtri((torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits)
    for _ in range(300):
        nearest = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
        levels = torch.stack([x[nearest == i].mean() for i in range(2**bits)])
    return levels.float()


def even(x: Tensor, bits: int) -> Tensor:
    """What the codes of `--kv` give back: in each block the largest magnitude has the lowest code."""
    lowest = -(2.0 ** (bits - 1))
    scale = (x.gather(-1, x.abs().argmax(-1, keepdim=True)) / lowest).bfloat16().float()
    by = torch.where(scale == 0, 0, 1 / scale)
    return (x * by).round().clamp(lowest, -1 - lowest) * scale


def normal(x: Tensor, bits: int) -> Tensor:
    """The same for levels of normal numbers. Codes and scale take turns, from two first scales."""
    levels = levels_of(bits)
    bounds = (levels[1:] + levels[:-1]) / 2
    best, least = torch.zeros_like(x), x.square().sum(-1, keepdim=True)
    for first in (0.85, 1.1):
        scale = first * x.square().mean(-1, keepdim=True).sqrt()
        for _ in range(3):
            code = levels[torch.bucketize(x / scale.clamp_min(1e-30), bounds)]
            scale = (x * code).sum(-1, keepdim=True) / code.square().sum(-1, keepdim=True)
        back = code * scale.bfloat16().float()
        error = (x - back).square().sum(-1, keepdim=True)
        best, least = torch.where(error < least, back, best), torch.minimum(error, least)
    return best


@functools.cache
def turn_of(width: int) -> Tensor:
    """The Hadamard matrix of `--kv 4`."""
    part, matrix = width & -width, torch.ones(1, 1)
    while len(matrix) < part:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.block_diag(*[matrix / part**0.5] * (width // part))


class Codes:
    """Keys and values of one reading of a text, in codes."""

    def __init__(self, way: Way, fitted: Fitted) -> None:
        self.way, self.fitted = way, fitted
        self._before: dict[tuple[int, int], Tensor] = {}

    def back(self, x: Tensor, place: Place) -> Tensor:
        """What is read instead of an ``x`` of shape (1, heads, tokens, width)."""
        block, loop, what = place
        if self.way.inputs != (what == INPUT):
            return x
        turn = turn_of(x.shape[-1])
        goal = (x @ turn).unflatten(-1, (-1, BLOCK))
        code = functools.partial(normal if self.way.normal else even, bits=self.way.at(loop))
        kept = code(goal)
        if loop and self.way.before:
            guess = self._guess(self._before[block, what], place).unflatten(-1, (-1, BLOCK))
            other = guess + code(goal - guess)
            errors = [(y - goal).square().sum(-1, keepdim=True) for y in (kept, other)]
            kept = torch.where(errors[1] < errors[0], other, kept)
        self._before[block, what] = kept.flatten(-2)
        return kept.flatten(-2) @ turn

    def _guess(self, before: Tensor, place: Place) -> Tensor:
        """What the loop before says of a loop."""
        factor, matrix = self.fitted[place]
        return {
            "difference": lambda: before,
            "factor": lambda: before * factor,
            "matrix": lambda: before @ matrix,
        }[self.way.before]()


class Fit:
    """Products of what codes are made of, loop by loop."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], Tensor] = {}
        self._sums: dict[Place, list[Tensor]] = {}

    def note(self, x: Tensor, place: Place) -> Tensor:
        """Adds an ``x`` of shape (1, heads, tokens, width) and gives it back."""
        block, loop, what = place
        now = (x[0] @ turn_of(x.shape[-1])).double()
        if loop:
            before = self._before[block, what]
            sums = self._sums.setdefault(place, [torch.zeros(()), torch.zeros(())])
            sums[0] = sums[0] + before.mT @ before
            sums[1] = sums[1] + before.mT @ now
        self._before[block, what] = now
        return x

    def fitted(self) -> Fitted:
        """Factor and matrix of each head with the least squared error."""

        def trace(x: Tensor) -> Tensor:
            return x.diagonal(dim1=-1, dim2=-2).sum(-1)[:, None, None]

        best = {}
        for place, (square, cross) in self._sums.items():
            little = 1e-4 * trace(square) / square.shape[-1] * torch.eye(square.shape[-1])
            best[place] = (
                (trace(cross) / trace(square)).float(),
                torch.linalg.solve(square + little, cross).float(),
            )
        return best


def attentions(system: Any) -> list[tuple[Block, int, int]]:
    """Of each block that runs, in order: itself, its number and the loop."""
    seen: dict[int, int] = {}
    ran = []
    for block in (block for name, block in system.program(system.n_steps).order if name == "block"):
        number = list(seen).index(id(block)) if id(block) in seen else len(seen)
        seen[id(block)] = seen.get(id(block), -1) + 1
        ran.append((block, number, seen[id(block)]))
    return ran


def read(system: Any, ids: list[int], change: Callable[[Tensor, Place], Tensor]) -> Tensor:
    """Log-probabilities of a text. Attention sees what `change` makes of keys, of values and of the input of both."""
    order = attentions(system)
    at, handles = iter(order), []
    inputs = {number: [i for i, (_, n, _) in enumerate(order) if n == number] for _, number, _ in order}
    attention = torch.nn.functional.scaled_dot_product_attention

    def changed(query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any) -> Tensor:
        _, number, loop = next(at)
        key, value = change(key, (number, loop, KEYS)), change(value, (number, loop, VALUES))
        return attention(query, key, value, *args, **more)

    def hook(number: int) -> Callable[..., Any]:
        loops: list[Tensor] = []

        def before(_: Any, args: tuple[Tensor]) -> tuple[Tensor]:
            # Keys, then values of each loop.
            if len(loops) % 2 == 0:
                loops.append(change(args[0][:, None], (number, len(loops) // 2, INPUT))[:, 0])
            else:
                loops.append(loops[-1])
            return (loops[-1],)

        return before

    if apart(order[0][0]):
        for number in inputs:
            block, before = order[inputs[number][0]][0], hook(number)
            handles += [module.register_forward_pre_hook(before) for module in block.qkv[1:3]]
    try:
        with patch("torch.nn.functional.scaled_dot_product_attention", changed):
            logp = rolled(system, ids)
    finally:
        for handle in handles:
            handle.remove()
    if next(at, None) is not None:
        raise SystemExit("the model has another attention than torch's")
    return logp


def apart(block: Block) -> bool:
    """Whether keys and values are layers of their own whose input has fewer numbers than both."""
    return len(block.qkv) == 3 and share_of(block) < 1


def share_of(block: Block) -> float:
    """Numbers of the input over those of keys and values."""
    width: int = block.qkv[0].in_features  # type: ignore[assignment]
    return width / (2 * block.kv_heads * block.head)


def price(block: Block) -> float:
    """Products that keys and values of one token take, over those of the block."""
    layers = (*block.qkv, block.out, *block.gate_up, block.down)
    sizes = [m.in_features * m.out_features for m in layers]  # type: ignore[operator]
    return float(sum(sizes[1:3]) / sum(sizes))  # type: ignore[arg-type, operator]


def pieces_of(loaded: Any, file: str, n: int, length: int) -> list[list[int]]:
    """Pieces of a text in tokens."""
    ids = prompt_ids(loaded, Path(file).read_text("utf-8")[: 40 * length * n])
    return [ids[i * length : (i + 1) * length] for i in range(n)]


def compare(model: str, args: argparse.Namespace) -> None:
    """Prints the lines of a model."""
    loaded = load_model(model)
    loaded.model.float()
    system, fit = loaded.system, Fit()
    for piece in pieces_of(loaded, args.fit, args.n_fit, args.length):
        read(system, piece, fit.note)
    fitted, pieces = fit.fitted(), pieces_of(loaded, args.text, args.n_texts, args.length)
    exact = [rolled(system, piece) for piece in pieces]
    loops = [loop for _, _, loop in attentions(system)]
    block, n_loops, again = attentions(system)[0][0], 1 + max(loops), sum(map(bool, loops)) / len(loops)
    base: list[float] = []
    for way in ways(n_loops, again == 1 - 1 / n_loops, apart(block)):
        far = [kl(e, read(system, p, Codes(way, fitted).back)) for e, p in zip(exact, pieces, strict=True)]
        base = base or far
        ratio = bootstrap([far, base], lambda a, b, axis: np.mean(a, axis) / np.mean(b, axis), 10_000)
        print(
            f"| {Path(model).name} | {way} | {way.bits} | {way.stored(again, share_of(block)):.2f} | "
            f"{np.mean(far):.5f} | {ratio.estimate:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] |",
            flush=True,
        )
    print(f"{Path(model).name}: loop, how far its keys and values are from the loop before")
    for loop, keys, values in likeness(system, pieces[0]):
        print(f"{loop}: {keys:.2f}, {values:.2f}")
    if apart(block):
        print(f"from an input, keys and values of a token: {price(block):.3f} of a block's products")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--text", required=True)
    parser.add_argument("--fit", required=True, help="text that factors and matrices are fitted to")
    parser.add_argument("--length", type=int, default=128, help="tokens of a piece (default %(default)s)")
    parser.add_argument("--n-texts", type=int, default=16)
    parser.add_argument("--n-fit", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | kept | bits | with scales | KL | over that of `--kv 4` |\n|---|---|---|---|---|---|")
    for model in args.models:
        compare(model, args)


if __name__ == "__main__":
    main()
