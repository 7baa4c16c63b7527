"""R-Llama and its like; what every system must show."""

from __future__ import annotations

from tests.support.conformance import SteppingConformance


class TestRLlama(SteppingConformance):
    system = "rllama"
