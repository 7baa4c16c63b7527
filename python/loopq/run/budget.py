"""A file size, and the cheapest choice of one candidate per set of layers within it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loopq.errors import ConfigError
from loopq.layers.grid import BITS, PER_CHANNEL
from loopq.layers.grids.table import UNEVEN
from loopq.quantizers.grid import AUTO, GridSettings
from loopq.settings.declare import Settings, parse_text, setting
from loopq.settings.execution import parse_bytes
from loopq.storage.schema import Object

#: Calibration prompts on which candidates are compared.
SCORED = 16


def parse_budget(text: str) -> float | int:
    """Read bits per weight, such as 3.25, or bytes with a unit, such as 900K."""
    value: float | int = parse_bytes(text) if text[-1:].upper() in tuple("KMGTB") else parse_text(float, text)
    return value


@dataclass(frozen=True)
class Fit(Settings):
    """How a size is divided between layers.

    Parameters
    ----------
    budget : float or int
        Size of the file with all weights. Grids are chosen to meet it. Give bits per weight of the model, such as 3.25,
        or bytes, such as 12GB.
    bits : tuple of int
        Allowed bits of a layer.
    group_sizes : tuple of int
        Allowed group sizes of a layer.
    """

    budget: float | int = setting(4.0, parse=parse_budget, metavar="BUDGET")
    bits: tuple[int, ...] = setting(BITS)
    group_sizes: tuple[int, ...] = setting((32, 64, 128))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.bits or not self.group_sizes:
            raise ConfigError("bits and group sizes to choose from: give one or more of each")
        wrong = sorted(set(self.bits) - set(BITS))
        if wrong:
            raise ConfigError(f"bits must be of {', '.join(map(str, BITS))}; got {wrong[0]}")
        for size in self.group_sizes:
            if size != PER_CHANNEL and size < 1:
                raise ConfigError(f"group_sizes must be -1 (per channel) or at least 1; got {size}")
        if not self.budget > 0:
            raise ConfigError(f"budget must be above 0; got {self.budget!r}")

    def grids(self, grid: GridSettings) -> list[Object]:
        """Return the settings of every allowed grid. Levels "auto" are even and uneven ones; others stay."""
        several = ("even", "uneven") if grid.levels == AUTO else (grid.levels,)
        return [
            {"bits": bits, "group_size": group, "levels": levels}
            for bits in self.bits
            for levels in several
            for group in self.group_sizes
            if levels != "uneven" or (grid.symmetric and bits in UNEVEN)
        ]

    def n_bytes(self, n_weights: int) -> int:
        """Return the budget in bytes for this number of weights."""
        return int(self.budget * n_weights / 8) if isinstance(self.budget, float) else self.budget


@dataclass(frozen=True)
class Candidate:
    """One way to store layers that must share it.

    Parameters
    ----------
    layers : tuple of str
        Parameter names. They share the choice.
    n_bytes : int
        Bytes of the layers in this form.
    cost : float
        Loss of the model. All candidates use the same unit.
    choice : mapping of str to dict
        Settings of each layer.
    """

    layers: tuple[str, ...]
    n_bytes: int
    cost: float
    choice: Mapping[str, Object]


def choose(candidates: Sequence[Candidate], budget: int, fixed: int = 0) -> list[Candidate]:
    """Choose one candidate for each set of layers with the least total cost within the budget.

    Parameters
    ----------
    candidates : sequence of Candidate
        All candidates. A layer belongs to only one set of layers.
    budget : int
        Bytes of these layers.
    fixed : int
        Bytes of everything else, which is not chosen.

    Returns
    -------
    list of Candidate
        The exact optimum, one for each set of layers.

    Raises
    ------
    ConfigError
        Even the smallest candidates exceed the budget.

    Notes
    -----
    The method keeps, set by set, the Pareto front of (bytes, cost) pairs. The best final pair within the budget is the
    optimum. Bytes of real layers have large common divisors, so the fronts stay small.
    """
    sets: dict[tuple[str, ...], list[Candidate]] = {}
    for candidate in candidates:
        sets.setdefault(candidate.layers, []).append(candidate)
    if not sets:
        raise ConfigError("nothing to choose: no candidates")
    least = sum(min(c.n_bytes for c in of_set) for of_set in sets.values())
    if least > budget:
        raise ConfigError(
            f"the file is to have {budget + fixed} bytes; its smallest has {least + fixed}: raise the budget, or give "
            "--set fit_bits=... and --set fit_group_sizes=... smaller candidates"
        )
    rest = least
    front: list[tuple[int, float, tuple[Candidate, ...]]] = [(0, 0.0, ())]
    for of_set in sets.values():
        rest -= min(c.n_bytes for c in of_set)
        grown = [
            (size + c.n_bytes, cost + c.cost, (*path, c))
            for size, cost, path in front
            for c in of_set
            if size + c.n_bytes + rest <= budget
        ]
        grown.sort(key=lambda item: (item[0], item[1]))
        front, best = [], float("inf")
        for item in grown:
            if item[1] < best:
                best = item[1]
                front.append(item)
    return list(min(front, key=lambda item: (item[1], item[0]))[2])
