"""Huginn: noise state, adapter and core blocks, and the requirements on every system."""

from __future__ import annotations

from tests.support.conformance import SteppingConformance


class TestHuginn(SteppingConformance):
    system = "huginn"
