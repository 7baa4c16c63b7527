"""The outcome of a campaign."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Counts:
    """The number of cases, a number for each outcome, and a line for each failure."""

    n_tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, outcome: str, wrong: str = "") -> None:
        """Count one case; `wrong` says what failed. Failures and every hundredth count are printed at
        once."""
        self.n_tried += 1
        self.outcomes[outcome] += 1
        if wrong:
            self.failures.append(wrong)
            print(f"  FAILED {wrong}", file=sys.stderr, flush=True)
        if self.n_tried % 100 == 0:
            print(f"  {self.said()}", file=sys.stderr, flush=True)

    def said(self) -> str:
        """All outcomes on one line."""
        return ", ".join(f"{n} {what}" for what, n in sorted(self.outcomes.items()))


def before(until: float, cases: Iterable[T]) -> Iterator[T]:
    """Cases until a time of the monotonic clock."""
    for case in cases:
        if time.monotonic() > until:
            return
        yield case
