"""ALBERT: one block for all layers; what every system must show."""

from __future__ import annotations

from tests.support.conformance import SteppingConformance


class TestAlbert(SteppingConformance):
    system = "albert"
