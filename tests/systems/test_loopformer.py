"""LoopFormer: steps that know their time; what every system must show."""

from __future__ import annotations

from tests.support.conformance import SteppingConformance


class TestLoopFormer(SteppingConformance):
    system = "loopformer"
