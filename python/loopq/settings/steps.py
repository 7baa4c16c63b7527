"""Choice of the recurrence steps that calibrate a layer, and weighting of their Hessians."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from loopq.errors import ConfigError
from loopq.settings.declare import Settings, setting

STEP_WEIGHTS = ("sum", "balanced")
_RANGE = re.compile(r"([0-9]{0,9}):([0-9]{0,9})")
_ALPHA = re.compile(r"alpha=([0-9]{1,18}(/[0-9]{1,18}|\.[0-9]{1,18})?|\.[0-9]{1,18})")


@dataclass(frozen=True)
class Calibration(Settings):
    """Recurrence steps that a layer is calibrated on.

    Parameters
    ----------
    steps : str
        Steps of the summed Hessian: all | first | 0:8 | 31 | 1:, or several joined by commas.
    step_weights : str
        Weight of each step: sum | balanced | alpha=A. With "sum" all rows have the same weight. With "balanced" each
        step has the same share of the channels. "alpha=A" gives step 0 the weight A against the mean of the others.
    """

    steps: str = setting("all", common=True, metavar="STEPS")
    step_weights: str = setting("sum", metavar="HOW")

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_step_weights(self.step_weights)


def parse_step_weights(spec: str) -> Fraction | str:
    """Read a step weighting: its name, or the exact alpha of "alpha=A".

    Raises
    ------
    ConfigError
        The name is unknown, or alpha is outside [0, 1].

    Examples
    --------
    >>> parse_step_weights("sum"), parse_step_weights("alpha=1/4"), parse_step_weights("alpha=0.25")
    ('sum', Fraction(1, 4), Fraction(1, 4))
    """
    if spec in STEP_WEIGHTS:
        return spec
    allowed = f"step_weights must be {', '.join(STEP_WEIGHTS)} or alpha=A with A in [0, 1]; got {spec!r}"
    match = _ALPHA.fullmatch(spec)
    if not match:
        raise ConfigError(allowed)
    try:
        alpha = Fraction(match[1])
    except ZeroDivisionError as cause:
        raise ConfigError(allowed) from cause
    if not 0 <= alpha <= 1:
        raise ConfigError(allowed)
    return alpha


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
