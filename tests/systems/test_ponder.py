"""Ponder: the embedding of the prediction is fed back; what every system must show."""

from __future__ import annotations

from tests.support.conformance import SteppingConformance


class TestPonder(SteppingConformance):
    system = "ponder"
