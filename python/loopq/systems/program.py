"""A looped decoder described as a program: what `loopq.inference.runner` runs without calling a module of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Block", "Branch", "Program"]


@dataclass(frozen=True)
class Branch:
    """Norms of a branch, ``x = stream(x + branch(f(input(x))))``; None where there is none."""

    input: nn.Module | None = None
    branch: nn.Module | None = None
    stream: nn.Module | None = None


@dataclass(frozen=True)
class Block:
    """Attention, then a gated MLP with SiLU.

    Parameters
    ----------
    heads, kv_heads, head : int
        Query heads, key/value heads, width of a head.
    neighbours : bool
        Whether rotary positions turn neighbours, or the halves of a head.
    qkv : tuple of nn.Module
        Linear layers whose outputs, one after another, are queries, keys and values, and gates where there are any.
    out : nn.Module
        Linear layer behind attention.
    gate_up : tuple of nn.Module
        Linear layers whose outputs, one after another, are gates and what they multiply.
    down : nn.Module
        Linear layer behind the gate.
    norms : tuple of Branch
        Of attention and of the MLP.
    scale : float
        What queries are multiplied by.
    qk_bias : Tensor, shape (heads + kv_heads, head), optional
        Added to queries and keys.
    qk_norms : tuple of nn.Module, optional
        Norms of each query and of each key.
    gates : bool
        Whether values attended to are multiplied by the sigmoids of gates, one for each.
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
    """What happens to a token.

    Parameters
    ----------
    embed : callable
        Token ids (n) to embeddings (n, width).
    order : sequence
        Steps: ("block", Block); ("norm", module); ("keep", i) keeps the state x under 0 or 1, ("take", i) goes back to
        what was kept, ("add", i) adds it; ("start", None) begins with the initial state; ("adapter", module) is
        ``x = W [x; e]``, e what was kept under 0.
    head : nn.Module
        Linear layer that gives the logits.
    angles : callable
        Number of positions to cosines and sines, float32 (n, head / 2, 2).
    start : callable, optional
        A batch of one text, and how many of its tokens have been seen, to the initial states (1, n, width) of the
        others: for a step "start".
    """

    embed: Callable[[Tensor], Tensor]
    order: Sequence[Step]
    head: nn.Module
    angles: Callable[[int], Tensor]
    start: Callable[[Any, int], Tensor] | None = None
