"""The sections of a diagnosis, one file each here or in the `diagnose.sections` of a room.

A section takes the context and returns plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loopq.diagnose.context import Context
from loopq.settings.registry import Registry

Found = Mapping[str, Any]


@dataclass(frozen=True)
class Section:
    """One section of a diagnosis.

    Parameters
    ----------
    run : callable
        Measures; returns plain data.
    order : int
        Place among the sections.
    loop : str
        What of it needs a single-step function, in words; empty where nothing does.
    exposed : bool
        Whether it needs a feedback-exposed layer.
    compares : bool
        Whether it compares predictions under different weights.
    rollouts : callable
        How many rollouts of one prompt it runs.
    seconds : callable
        What it takes besides, from the seconds of one step of one prompt.
    says : callable
        A sentence about what was found, for the terminal; empty where the verdicts of the layers say it.
    """

    run: Callable[[Context], dict[str, Any]]
    order: int
    loop: str = ""
    exposed: bool = False
    compares: bool = False
    rollouts: Callable[[Context], int] = lambda context: 0
    seconds: Callable[[Context, float], float] = lambda context, step: 0.0
    says: Callable[[Found], str] = lambda found: ""


SECTIONS: Registry[Section] = Registry("section", "loopq.diagnose.sections")


def in_order() -> dict[str, Section]:
    """Every section by its name, in their order."""
    return dict(sorted(SECTIONS, key=lambda entry: entry[1].order))


__all__ = ["SECTIONS", "Found", "Section", "in_order"]
