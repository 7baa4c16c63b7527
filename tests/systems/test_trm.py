"""TRM and HRM: recursive models of puzzles; what every system must show."""

from __future__ import annotations

from tests.support.conformance import SteppingConformance


class TestTRM(SteppingConformance):
    system = "trm"
