"""Nanbeige: the whole stack, norms between loops; what every system must show."""

from __future__ import annotations

from tests.support.conformance import SteppingConformance


class TestNanbeige(SteppingConformance):
    system = "nanbeige"
