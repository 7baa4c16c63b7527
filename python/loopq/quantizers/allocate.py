"""Bits for each layer under a byte budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loopq.config import QuantConfig
from loopq.errors import ConfigError


@dataclass(frozen=True)
class Choice:
    """One way to quantize one layer.

    Parameters
    ----------
    layer : str
        Parameter name.
    bits : int
        Bits per code.
    n_bytes : int
        What the layer then takes.
    cost : float
        What the model then loses, in the same unit for every layer.
    group_size : int, optional
        Input columns of a scale, where that is chosen too.
    """

    layer: str
    bits: int
    n_bytes: int
    cost: float
    group_size: int | None = None


@dataclass(frozen=True)
class Allocation:
    """The bits of every layer.

    Parameters
    ----------
    bits : dict of str to int
        By parameter name.
    n_bytes : int
        Bytes of all layers.
    cost : float
        Sum of the layers' costs: a prediction that leaves their interplay out.
    group_sizes : dict of str to int
        By parameter name, of the layers whose group size was chosen too.
    """

    bits: dict[str, int]
    n_bytes: int
    cost: float
    group_sizes: dict[str, int] = field(default_factory=dict)

    def apply(self, config: QuantConfig) -> QuantConfig:
        """Return the settings with an override for every layer."""
        from loopq.config import Override

        own = tuple(
            Override(
                _exact(name),
                {"bits": bits} | ({"group_size": self.group_sizes[name]} if name in self.group_sizes else {}),
            )
            for name, bits in self.bits.items()
        )
        return dataclasses.replace(config, overrides=(*config.overrides, *own))


def _exact(name: str) -> str:
    import re

    return "re:^" + re.escape(name) + "$"


def allocate(choices: Sequence[Choice], budget: int) -> Allocation:
    """Choose one way for each layer so that the sum of costs is least and the bytes stay within the budget.

    Parameters
    ----------
    choices : sequence of Choice
        All ways of all layers.
    budget : int
        Bytes.

    Returns
    -------
    Allocation
        The exact optimum.

    Raises
    ------
    ConfigError
        Not even the smallest choices fit.

    Notes
    -----
    Layer by layer the set of (bytes, cost) pairs that no other pair beats in both is kept; the best pair within
    the budget at the end is the optimum. Bytes of real layers have large common divisors, so that the sets stay
    small.
    """
    layers: dict[str, list[Choice]] = {}
    for choice in choices:
        layers.setdefault(choice.layer, []).append(choice)
    if not layers:
        raise ConfigError("nothing to allocate: no choices")
    least = sum(min(c.n_bytes for c in ways) for ways in layers.values())
    if least > budget:
        raise ConfigError(f"the budget is {budget} bytes; the smallest choice of every layer takes {least}")
    room = least
    front: list[tuple[int, float, tuple[Choice, ...]]] = [(0, 0.0, ())]
    for ways in layers.values():
        room -= min(c.n_bytes for c in ways)
        grown = [
            (size + c.n_bytes, cost + c.cost, (*path, c))
            for size, cost, path in front
            for c in ways
            if size + c.n_bytes + room <= budget
        ]
        grown.sort(key=lambda item: (item[0], item[1]))
        front, best = [], float("inf")
        for item in grown:
            if item[1] < best:
                best = item[1]
                front.append(item)
    size, cost, path = min(front, key=lambda item: (item[1], item[0]))
    groups = {c.layer: c.group_size for c in path if c.group_size is not None}
    return Allocation({c.layer: c.bits for c in path}, size, cost, groups)


def bytes_at(choices: Mapping[str, Mapping[int, int]], bits: int) -> int:
    """Bytes of all layers at the same bits."""
    return sum(sizes[bits] for sizes in choices.values())
