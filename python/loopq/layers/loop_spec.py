"""A loop of layers in ``config.json`` and on the command line: ``looped:MODEL[FIRST:LAST]xTIMES``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from loopq.errors import ConfigError

#: Maximum depth of a rollout. A larger number is a mistake that would exhaust the machine's memory.
MAX_STEPS = 1 << 16
#: Key of a ``config.json`` that loops a dense model: first layer, the one after the last, times.
LOOP = "looped_layers"
#: Prefix of the "architectures" in such a config.json, since the plain name belongs to the dense model.
PREFIX = "Looped"
#: Its "model_type", which plain transformers refuses, and the key with the type of the dense model.
LOOPED_TYPE, BASE = "loopq_looped", "looped_base"
_SPEC = re.compile(
    r"looped:(?P<model>.+)\[(?P<first>[0-9]{1,4}):(?P<last>[0-9]{1,4})\]x(?P<times>[0-9]{1,4})"
)


def parse_spec(spec: str) -> tuple[str, list[int] | None]:
    """Split ``looped:MODEL[FIRST:LAST]xTIMES`` into the model and its loop; None for a model without a loop.

    Raises
    ------
    ConfigError
        The text begins with ``looped:`` but does not follow this syntax.
    """
    if not spec.startswith("looped:"):
        return spec, None
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ConfigError(
            f"{spec!r}: write looped:MODEL[FIRST:LAST]xTIMES; looped:MODEL[8:20]x2 runs layers 8 to 19 twice"
        )
    return match["model"], [int(match[name]) for name in ("first", "last", "times")]


def with_loop(config: Mapping[str, Any], loop: Sequence[int]) -> dict[str, Any]:
    """Return the ``config.json`` of a dense model with a loop: a type of its own, and a prefix of its architectures."""
    names = config.get("architectures") or []
    entries = {LOOP: list(loop), "architectures": [PREFIX + n.removeprefix(PREFIX) for n in names]}
    base = config.get("model_type")
    typed = {} if base in (None, LOOPED_TYPE) else {"model_type": LOOPED_TYPE, BASE: base}
    return {**config, **entries, **typed}


def without_type(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` with the type of the dense model, which loopq builds. The loop stays.

    Raises
    ------
    ConfigError
        The type is that of a looped model, and the dense model's is missing.
    """
    if config.get("model_type") != LOOPED_TYPE:
        return dict(config)
    base = config.get(BASE)
    if not isinstance(base, str) or LOOP not in config:
        raise ConfigError(
            f"config.json: model_type {LOOPED_TYPE} needs {BASE} (a model_type of transformers, such as 'llama') and "
            f"{LOOP} ([FIRST, LAST, TIMES])"
        )
    rest = {k: v for k, v in config.items() if k not in (BASE, "auto_map")}
    return {**rest, "model_type": base}


def layer_order(loop: Any, n_layers: int, times: int | None = None) -> list[int]:
    """Return the numbers of the layers in their execution order.

    `loop` is the unchecked value of `looped_layers` in a ``config.json``. It gives the runs of the loop if `times` does
    not.

    Raises
    ------
    ConfigError
        The loop is invalid for this model.
    """
    good = isinstance(loop, Sequence) and len(loop) == 3 and all(type(v) is int for v in loop)
    if not good or not (0 <= loop[0] < loop[1] <= n_layers and 1 <= loop[2] <= MAX_STEPS):
        raise ConfigError(
            f"{LOOP} {loop!r} of a model with {n_layers} layers: give FIRST, LAST and TIMES with "
            f"0 <= FIRST < LAST <= {n_layers} and 1 <= TIMES <= {MAX_STEPS}"
        )
    first, last, default = loop
    every = list(range(n_layers))
    return every[:first] + every[first:last] * (default if times is None else times) + every[last:]
