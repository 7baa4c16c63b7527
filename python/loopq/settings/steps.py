"""Choice of the recurrence steps that calibrate a layer, and weighting of their Hessians."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from loopq.errors import ConfigError, UnknownNameError
from loopq.settings.declare import Settings, setting
from loopq.settings.registry import Registry

_RANGE = re.compile(r"([0-9]{0,9}):([0-9]{0,9})")


class StepSums(Protocol):
    """Hessians of separate steps, as far as a weighting reads them."""

    def diagonal(self, steps: Sequence[int] | None = None) -> NDArray[np.float64]:
        """Diagonal of the sum over steps, shape (d,)."""


StepWeights: TypeAlias = list[float] | list[Fraction]
#: Weight of each step, of (their sums, steps).
Weigher: TypeAlias = Callable[[StepSums, Sequence[int]], StepWeights]
#: Readers of the text after "NAME=". A guest brings all but "sum".
WEIGHTINGS: Registry[Callable[[str], Weigher]] = Registry(
    "step weighting", "loopq.settings", rooms={"alpha": "paper", "balanced": "paper"}
)


@dataclass(frozen=True)
class Calibration(Settings):
    """Recurrence steps that a layer is calibrated on.

    Parameters
    ----------
    steps : str
        Steps of the summed Hessian: all | first | 0:8 | 31 | 1:, or several joined by commas.
    step_weights : str
        Weight of each step: sum | NAME | NAME=VALUE. With "sum" all rows have the same weight.
    """

    steps: str = setting("all", common=True, metavar="STEPS")
    step_weights: str = setting("sum", metavar="HOW", names=WEIGHTINGS)

    def __post_init__(self) -> None:
        super().__post_init__()
        weigher_of(self.step_weights)


def weigher_of(spec: str) -> Weigher | None:
    """Read a step weighting: NAME or NAME=VALUE. None for "sum".

    Raises
    ------
    ConfigError
        The name is unknown, or the weighting does not allow the value.
    """
    if spec == "sum":
        return None
    name, _, value = spec.partition("=")
    try:
        return WEIGHTINGS.get(name)(value)
    except UnknownNameError as cause:
        raise UnknownNameError(
            f"step_weights must be sum, NAME or NAME=VALUE; got {spec!r}: {cause}"
        ) from cause
    except ConfigError as cause:
        raise ConfigError(f"step_weights {spec!r}: {cause}") from cause


def parse_steps(spec: str, n_steps: int) -> list[int]:
    """Read a choice of recurrence steps.

    Parameters
    ----------
    spec : str
        "all" (the trajectory), "first" (step 0 alone), a range or one number (a single step). "a:b" has the steps a to
        b-1: "0:8" is the first eight, and "1:" omits step 0. Commas join several choices.
    n_steps : int
        Number of existing recurrence steps.

    Returns
    -------
    list of int
        Ascending, without repeats, never empty.

    Raises
    ------
    ConfigError
        A step does not exist, the choice is empty, or its syntax is unknown.

    Examples
    --------
    >>> parse_steps("all", 4), parse_steps("first", 4), parse_steps("1:", 4), parse_steps("0:2,3", 4)
    ([0, 1, 2, 3], [0], [1, 2, 3], [0, 1, 3])
    """
    chosen: set[int] = set()
    for raw in spec.split(","):
        part = raw.strip()
        match = _RANGE.fullmatch(part)
        if part == "all":
            steps = range(n_steps)
        elif part == "first":
            steps = range(1)
        elif match:
            low = int(match[1] or 0)
            high = int(match[2]) if match[2] else n_steps
            if high > n_steps:
                raise ConfigError(f"steps {part!r}: the rollout has {n_steps} steps, 0 to {n_steps - 1}")
            steps = range(low, high)
        elif re.fullmatch("[0-9]{1,9}", part):
            steps = range(int(part), int(part) + 1)
        else:
            raise ConfigError(f"steps {part!r}: use all, first, a:b, a: or one number, joined by commas")
        if len(steps) == 0 or steps[-1] >= n_steps:
            raise ConfigError(f"steps {part!r}: the rollout has {n_steps} steps, 0 to {n_steps - 1}")
        chosen.update(steps)
    return sorted(chosen)
