"""Ouro: the whole stack is the loop; what every system must show."""

from __future__ import annotations

from tests.support.conformance import SteppingConformance


class TestOuro(SteppingConformance):
    system = "ouro"
