"""A looped decoder as a program that `loopq.runtime.runner` runs without calling the model's modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Block", "Branch", "Program"]


@dataclass(frozen=True)
class Branch:
    """Norms of a branch, ``x = stream(x + branch(f(input(x))))``. None for an absent one."""

    input: nn.Module | None = None
    branch: nn.Module | None = None
    stream: nn.Module | None = None


@dataclass(frozen=True)
class Block:
    """Attention, then a gated MLP with SiLU.

    Parameters
    ----------
    heads, kv_heads, head : int
        Number of query heads and key/value heads, and width of a head.
    neighbours : bool
        Whether rotary positions rotate neighbours or the halves of a head.
    qkv : tuple of nn.Module
        Linear layers with concatenated outputs: queries, keys, values and optional gates.
    out : nn.Module
        Linear layer behind attention.
    gate_up : tuple of nn.Module
        Linear layers with concatenated outputs: gates and the values they multiply.
    down : nn.Module
        Linear layer behind the gate.
    norms : tuple of Branch
        Norms of attention and of the MLP.
    scale : float
        Factor of the queries.
    qk_bias : Tensor of shape (heads + kv_heads, head), optional
        Added to queries and keys.
    qk_norms : tuple of nn.Module, optional
        Norms of each query and of each key.
    gates : bool
        Whether attended values are multiplied by the sigmoids of their gates.
    """

    heads: int
    kv_heads: int
    head: int
    neighbours: bool
    qkv: tuple[nn.Module, ...]
    out: nn.Module
    gate_up: tuple[nn.Module, ...]
    down: nn.Module
    norms: tuple[Branch, Branch]
    scale: float
    qk_bias: Tensor | None = None
    qk_norms: tuple[nn.Module, nn.Module] | None = None
    gates: bool = False


#: Its name, and what it is about.
Step: TypeAlias = "tuple[str, Block | nn.Module | int | None]"


@dataclass(frozen=True)
class Program:
    """Operations on a token.

    Parameters
    ----------
    embed : callable
        Token ids (n) to embeddings (n, width).
    order : sequence
        Steps of the program. ("block", Block) and ("norm", module) apply a module. ("keep", i) stores the state x
        under 0 or 1. ("take", i) returns to the stored state and ("add", i) adds it. ("start", None) begins with the
        initial state. ("adapter", module) is ``x = W [x; e]`` with e the state stored under 0.
    head : nn.Module
        Linear layer of the logits.
    angles : callable
        Number of positions to cosines and sines, float32 (n, head / 2, 2).
    start : callable, optional
        For a step "start". Maps a batch of one text and the number of seen tokens to the initial states (1, n, width)
        of the others.
    """

    embed: Callable[[Tensor], Tensor]
    order: Sequence[Step]
    head: nn.Module
    angles: Callable[[int], Tensor]
    start: Callable[[Any, int], Tensor] | None = None
