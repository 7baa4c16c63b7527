"""The drawing of the loop."""

from __future__ import annotations

from loopq.analysis.report import loopfigure
from loopq.analysis.report.sections import FIGURES, Diagnosis, Part
from loopq.analysis.report.style import Picture


def loop(d: Diagnosis) -> Picture:
    """Drawing of the loop."""
    return loopfigure.draw(d)


FIGURES.register("loop")(Part(loop, 10))
