"""Corrections that know the step: a gain and a bias for each recurrence step and channel at some places of the loop.

A place is the state after a step, or the output of a quantized layer. With z the value there at step t,

    z' = z (1 + g_t) + b_t,        g_t, b_t of the width of z,

or one g and b for all steps (`shared`): what a plain bias could do, without any notion of a step. Numbers are stored as
int8 with one float16 scale for each vector: steps * 2 * (width + 2) bytes a place. Or, at a layer with input x, a
product of low rank shared by the steps, with a diagonal for each: z' = z + U diag(a_t) V^T x, stored in the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from loopq.calibrate.data import TokenSet
from loopq.gradients.unroll import unroll
from loopq.systems.base import LoopedSystem, setting

STATE = "state"


@dataclass
class Place:
    """Gains and biases of one place.

    Parameters
    ----------
    gain, bias : Tensor, shape (steps or 1, width)
        g_t and b_t in units of `size`.
    size : Tensor, shape (steps or 1, width)
        Root mean square of the value there; derived, not stored: the stored numbers are g and size * b.
    """

    gain: Tensor
    bias: Tensor
    size: Tensor

    def at(self, value: Tensor, t: int, read: Tensor | None = None) -> Tensor:
        """The corrected value at step t."""
        row = min(t, len(self.gain) - 1)
        moved: Tensor = value * (1 + self.gain[row]) + (self.bias[row] * self.size[row])
        return moved.to(value.dtype)

    def moving(self) -> list[Tensor]:
        """What a gradient moves, from now on with one."""
        self.gain, self.bias = (x.clone().requires_grad_(True) for x in (self.gain, self.bias))
        return [self.gain, self.bias]

    def stored(self) -> Place:
        """The same after storage in int8."""
        bias = eight_bits(self.bias.detach() * self.size)
        return Place(eight_bits(self.gain.detach()), bias / self.size, self.size)

    @property
    def n_bytes(self) -> int:
        """Bytes in a file; a vector that is zero throughout is left out."""
        kinds = [x for x in (self.gain, self.bias) if bool((x != 0).any())]
        return sum(x.numel() + 2 * len(x) for x in kinds)


@dataclass
class LowRank:
    """U diag(a_t) V^T x at one layer.

    Parameters
    ----------
    left, right : Tensor, shape (rank, out_features) and (rank, in_features)
        U^T and V^T.
    steps : Tensor, shape (steps, rank)
        a_t.
    """

    left: Tensor
    right: Tensor
    steps: Tensor

    def at(self, value: Tensor, t: int, read: Tensor | None = None) -> Tensor:
        """The corrected value at step t."""
        assert read is not None
        moved: Tensor = value + (read @ self.right.T * self.steps[t]) @ self.left
        return moved

    def moving(self) -> list[Tensor]:
        """What a gradient moves, from now on with one."""
        self.left, self.right, self.steps = (
            x.clone().requires_grad_(True) for x in (self.left, self.right, self.steps)
        )
        return [self.left, self.right, self.steps]

    def stored(self) -> LowRank:
        """The same after storage in int8."""
        return LowRank(*(eight_bits(x.detach()) for x in (self.left, self.right, self.steps)))

    @property
    def n_bytes(self) -> int:
        """Bytes in a file."""
        return sum(x.numel() + 2 * len(x) for x in (self.left, self.right, self.steps))


def eight_bits(values: Tensor) -> Tensor:
    """Each row rounded to int8 times a float16 scale."""
    scale = (values.abs().amax(dim=1, keepdim=True) / 127).half().float().clamp(min=1e-7)
    return (values / scale).round().clamp(-127, 127) * scale


@dataclass
class Corrections:
    """Corrections at some places, by the name of the place: "state", or a parameter of the model."""

    places: dict[str, Place | LowRank] = field(default_factory=dict)

    @contextlib.contextmanager
    def applied(self, system: LoopedSystem) -> Iterator[None]:
        """Correct every rollout inside the block; a rollout is told from the next by its first step."""
        handles: list[Any] = []
        with contextlib.ExitStack() as stack:
            if STATE in self.places:
                plain, place = system.step, self.places[STATE]

                def step(state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
                    return place.at(plain(state, embedding, t, n_steps), t)

                stack.enter_context(setting(system, step=step))
            for name in self.places.keys() - {STATE}:
                hook = _counted(self.places[name].at, calls_of(system, name))
                for module in modules_of(system, name):
                    handles.append(module.register_forward_hook(hook))
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def stored(self) -> Corrections:
        """The same after storage."""
        return Corrections({name: place.stored() for name, place in self.places.items()})

    @property
    def n_bytes(self) -> int:
        """Bytes in a file."""
        return sum(place.n_bytes for place in self.places.values())


def _counted(change: Callable[..., Tensor], calls: int) -> Callable[[Any, Any, Tensor], Tensor]:
    """A hook that knows which call of a rollout it is; the model runs whole rollouts."""
    seen = 0

    def hook(module: Any, args: Any, out: Tensor) -> Tensor:
        nonlocal seen
        t, seen = seen % calls, seen + 1
        return change(out, t, args[0])

    return hook


def calls_of(system: LoopedSystem, name: str) -> int:
    """Calls of a parameter in one rollout."""
    return next(p.invocations for p in system.shared_parameters(system.n_steps) if p.name == name)


def modules_of(system: LoopedSystem, name: str) -> list[Any]:
    """Modules that hold a parameter, each once."""
    owners = next(p.owners for p in system.shared_parameters(system.n_steps) if p.name == name)
    modules = dict(system.model.named_modules(remove_duplicate=False))
    return list({id(modules[o]): modules[o] for o in owners}.values())


def watched(
    system: LoopedSystem, tokens: TokenSet, names: Sequence[str], see: Callable[[str, int, Tensor], None]
) -> None:
    """Run prompts with the model as it is, and hand over what passes at some places: name, step, rows."""

    def seen(name: str) -> Place:
        class Seen(Place):
            def at(self, value: Tensor, t: int, read: Tensor | None = None) -> Tensor:
                see(name, t, value.detach().reshape(-1, value.shape[-1]))
                return value

        none = torch.zeros(1, 1)
        return Seen(none, none, none)

    with torch.no_grad(), Corrections({n: seen(n) for n in names}).applied(system):
        for batch in tokens.batches(8, 0):
            unroll(system, batch, system.n_steps)


def blank(system: LoopedSystem, tokens: TokenSet, names: Sequence[str], shared: bool = False) -> Corrections:
    """Corrections that do nothing yet, with the sizes of what passes in the full-precision rollout."""
    squares: dict[tuple[str, int], Tensor] = {}
    counts: dict[tuple[str, int], int] = {}

    def see(name: str, t: int, rows: Tensor) -> None:
        key = (name, 0 if shared else t)
        squares[key] = squares.get(key, torch.zeros(rows.shape[1])) + rows.float().square().sum(0)
        counts[key] = counts.get(key, 0) + len(rows)

    watched(system, tokens, names, see)
    places: dict[str, Place | LowRank] = {}
    for name in names:
        steps = sorted(t for n, t in squares if n == name)
        size = torch.stack([(squares[name, t] / counts[name, t]).sqrt() for t in steps])
        size = size.clamp(min=1e-6 * float(size.max()))
        places[name] = Place(torch.zeros_like(size), torch.zeros_like(size), size)
    return Corrections(places)
