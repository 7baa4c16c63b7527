"""Huginn: noise state, adapter, core blocks; what every system must show."""

from __future__ import annotations

from tests.support.conformance import SteppingConformance


class TestHuginn(SteppingConformance):
    system = "huginn"
