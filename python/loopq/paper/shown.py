"""A table of the paper in loopq: its measurement on one model, and the comparison of models with the paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loopq.analysis.report.style import Picture
from loopq.errors import ConfigError
from loopq.evaluation.stats import Interval
from loopq.settings.registry import Registry
from loopq.storage.schema import Object
from loopq.terminal.table import render

if TYPE_CHECKING:
    from loopq.paper.bench import Bench

Found = Mapping[str, Any]


@dataclass(frozen=True)
class ShownTable:
    """A table with its heading and explanation.

    Parameters
    ----------
    text : str
        Explanation of the columns.
    header : tuple of str
        Column heads.
    rows : tuple of tuple
        Cells. None is shown as a dash.
    """

    title: str
    text: str
    header: tuple[str, ...]
    rows: tuple[tuple[str | None, ...], ...]

    def plain(self) -> str:
        """Return the table as text for a terminal."""
        return f"{self.title}\n{self.text}\n\n{render(self.header, self.rows)}\n"

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [" | ".join(self.header), "|".join(["---"] * len(self.header))]
        lines += [" | ".join("-" if c is None else c for c in row) for row in self.rows]
        return f"## {self.title}\n\n{self.text}\n\n" + "\n".join(f"| {line} |" for line in lines) + "\n"


#: Prompts, articles or layers that a verdict needs, for fewer resample to themselves; and items of a score. A claim
#: with fewer has no verdict, and its numbers stand in the table.
MIN_UNITS, MIN_ANSWERS = 5, 500


@dataclass(frozen=True)
class Claim:
    """One statement of the paper, tested against the measurement on one model by a common rule.

    The claim holds if the whole paired interval is on its side of the bound. It does not hold if the whole interval is
    on the other side. Otherwise the interval may lie within `alike`, and if it does not, the claim is open.

    Parameters
    ----------
    model : str
        Name of the model.
    text : str
        The statement.
    found : str
        The measured numbers with their interval.
    interval : Interval
        Interval of the claimed quantity, paired over prompts, items or layers.
    bound : float
        Value that the interval has to exclude.
    below : bool
        Whether the claimed quantity is below the bound instead of above it.
    why_open : str
        Why no interval can decide it, such as a difference below the resolution.
    differs : str
        Of a claim on a pair: the one thing in which the two differ.
    pair : tuple of str
        Names of the two where they are variants.
    alike : pair of float
        Values that make no difference.
    p : float or None
        Of a claim on right answers: the p value of its exact test, adjusted for the family of all scores.
    given : str
        Why the claim holds by construction, so that it is a check of the code and no evidence. Empty for all others.
    """

    model: str
    text: str
    found: str
    interval: Interval
    bound: float = 0.0
    below: bool = False
    why_open: str = ""
    differs: str = ""
    alike: tuple[float, float] = (float("inf"), -float("inf"))
    p: float | None = None
    pair: tuple[str, ...] = ()
    given: str = ""

    @property
    def asked(self) -> bool:
        """Whether there are enough units for a verdict."""
        return self.interval.n >= (MIN_UNITS if self.p is None else MIN_ANSWERS)

    @property
    def undecided(self) -> str:
        """Why the claim is undecided, apart from the interval. Empty if the interval decides."""
        return self.why_open or ("" if self.p is None or self.p < 0.05 else "p is not below 0.05")

    @property
    def holds(self) -> bool | None:
        """Whether it holds. None if it is undecided or makes no difference."""
        if self.undecided or not self.asked:
            return None
        above, below = self.interval.low > self.bound, self.interval.high < self.bound
        return (below if self.below else above) if above or below else None

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        if self.holds is not None:
            return ("holds by construction" if self.given else "holds") if self.holds else "does not hold"
        level = self.asked and self.alike[0] <= self.interval.low and self.interval.high <= self.alike[1]
        return "makes no difference" if level else "is left open"

    def line(self) -> str:
        """Return the claim as one sentence."""
        p = "" if self.p is None else f"p = {self.p:.3g} after Holm"
        differs = self.differs and f"differs: {self.differs}"
        if self.pair and not all(name in self.text for name in self.pair):
            differs = f"{' against '.join(self.pair)}, {differs}"
        details = "; ".join(filter(None, (self.found, p, self.undecided, self.given, differs)))
        return f"{self.model}: {self.text}: {self.verdict} ({details})"

    def to_json(self) -> Object:
        """Plain data."""
        shown = {"verdict": self.verdict, "found": self.found, "differs": self.differs, "p": self.p}
        return {"model": self.model, "text": self.text} | shown


@dataclass(frozen=True)
class Shown:
    """A table ready to print.

    Parameters
    ----------
    tables : sequence of ShownTable
        The numbers.
    claims : sequence of Claim
        The paper's claims about these tables.
    pictures : callable
        Draws the figures. Needs matplotlib.
    lines : sequence of str
        Sentences over all models.
    """

    tables: Sequence[ShownTable]
    claims: Sequence[Claim] = ()
    pictures: Callable[[], Sequence[Picture]] = field(default=lambda: ())
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of the paper, or several from one experiment.

    Parameters
    ----------
    labels : tuple of str
        Labels in the paper: "Table 6", "Figure 3", "Algorithm 1", "Appendix J".
    title : str
        What it holds.
    paper : str
        What the paper's showed.
    measure : callable or None
        Takes a bench and returns plain data. None if no model is needed.
    show : callable
        Takes the data of all models. There are none if `measure` is None.
    refuses : callable
        Takes a bench. Returns the reason why its model cannot have this table, or None if it can.
    one_step : bool
        Whether models with one-step rollouts can have it. They are no evidence about loops, so most tables refuse.
    """

    labels: tuple[str, ...]
    title: str
    paper: str
    measure: Callable[[Bench], Object] | None
    show: Callable[[Sequence[Found]], Shown]
    refuses: Callable[[Bench], str | None] = lambda bench: None
    one_step: bool = False


TABLES: Registry[PaperTable] = Registry("table", "loopq.paper.tables")


def order(label: str) -> tuple[int, int, str]:
    """Sort key of labels: figures, tables, then the others, each by number."""
    kind, _, number = label.partition(" ")
    digits = "".join(c for c in number if c.isdigit())
    return ("Figure", "Table").index(kind) if kind in ("Figure", "Table") else 2, int(digits or 0), number


def find(name: str) -> tuple[str, PaperTable]:
    """Return name and entry of a table by its name ("horizon") or by a label ("table-6", "figure-3").

    Raises
    ------
    ConfigError
        If no table has that name or label.
    """
    for known, entry in TABLES:
        if name == known or name in (label.lower().replace(" ", "-") for label in entry.labels):
            return known, entry
    labels = sorted((label for _, entry in TABLES for label in entry.labels), key=order)
    raise ConfigError(
        f"no table {name!r} of the paper; known: {', '.join(TABLES.names())}, or one of "
        f"{', '.join(label.lower().replace(' ', '-') for label in labels)}"
    )
