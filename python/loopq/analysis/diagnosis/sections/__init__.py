"""The sections of a diagnosis, one file each. Subpackages such as `loopq.paper` add theirs.

A section takes the context and returns plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loopq.analysis.diagnosis.context import Context
from loopq.settings.registry import Registry
from loopq.storage.schema import Object

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
        Parts that need a single-step function, in words. Empty if there are none.
    square : bool
        Whether these parts also need a state of fixed size.
    exposed : bool
        Whether the section needs a feedback-exposed layer.
    compares : bool
        Whether the section compares predictions under different weights.
    rollouts : callable
        Number of rollouts per prompt.
    seconds : callable
        Additional seconds, given the seconds of one step of one prompt.
    says : callable
        A sentence about the result for the terminal. Empty where the layers' verdicts report it.
    """

    run: Callable[[Context], Object]
    order: int
    loop: str = ""
    square: bool = False
    exposed: bool = False
    compares: bool = False
    rollouts: Callable[[Context], int] = lambda context: 0
    seconds: Callable[[Context, float], float] = lambda context, step: 0.0
    says: Callable[[Found], str] = lambda result: ""


SECTIONS: Registry[Section] = Registry("section", "loopq.analysis.diagnosis.sections")


def in_order() -> dict[str, Section]:
    """All sections by name, in their order."""
    return dict(sorted(SECTIONS, key=lambda entry: entry[1].order))


__all__ = ["SECTIONS", "Found", "Section", "in_order"]
