"""A loop of layers as ``config.json`` and the command line tell it: ``looped:MODEL[FIRST:LAST]xTIMES``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from loopq.errors import ConfigError

#: Deepest rollout: a number above it is a mistake, which would take the memory of the machine before it showed.
MAX_STEPS = 1 << 16
#: Key of a ``config.json`` that makes a dense model a looped one: first layer, the one after the last, times.
LOOP = "looped_layers"
#: Before the names under "architectures" of such a config.json: the dense model's name would be another model's.
PREFIX = "Looped"
_SPEC = re.compile(
    r"looped:(?P<model>.+)\[(?P<first>[0-9]{1,4}):(?P<last>[0-9]{1,4})\]x(?P<times>[0-9]{1,4})"
)


def parse_spec(spec: str) -> tuple[str, list[int] | None]:
    """Divide ``looped:MODEL[FIRST:LAST]xTIMES`` into the model and its loop, None for a model without one.

    Raises
    ------
    ConfigError
        It begins with ``looped:`` and goes on otherwise.
    """
    if not spec.startswith("looped:"):
        return spec, None
    found = _SPEC.fullmatch(spec)
    if found is None:
        raise ConfigError(
            f"{spec!r}: write looped:MODEL[FIRST:LAST]xTIMES; looped:MODEL[8:20]x2 runs layers 8 to 19 twice"
        )
    return found["model"], [int(found[name]) for name in ("first", "last", "times")]


def with_loop(config: Mapping[str, Any], loop: Sequence[int]) -> dict[str, Any]:
    """Return the ``config.json`` of a dense model with a loop; its architectures are named for what it is now."""
    names = config.get("architectures") or []
    return {**config, LOOP: list(loop), "architectures": [PREFIX + n.removeprefix(PREFIX) for n in names]}


def layer_order(loop: Any, n_layers: int, times: int | None = None) -> list[int]:
    """Return the numbers of the layers in the order in which they run.

    Parameters
    ----------
    loop : Any
        What a ``config.json`` gives as `looped_layers`.
    n_layers : int
        Layers that there are.
    times : int, optional
        Runs of the loop; those of `loop` when absent.

    Raises
    ------
    ConfigError
        It is no loop of such a model.
    """
    good = isinstance(loop, Sequence) and len(loop) == 3 and all(type(v) is int for v in loop)
    if not good or not (0 <= loop[0] < loop[1] <= n_layers and 1 <= loop[2] <= MAX_STEPS):
        raise ConfigError(
            f"{LOOP} {loop!r} of a model with {n_layers} layers: give FIRST, LAST and TIMES with "
            f"0 <= FIRST < LAST <= {n_layers} and 1 <= TIMES <= {MAX_STEPS}"
        )
    first, last, own = loop
    every = list(range(n_layers))
    return every[:first] + every[first:last] * (own if times is None else times) + every[last:]
