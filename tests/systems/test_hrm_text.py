"""HRM-Text: two stacks in turn; what every system must show."""

from __future__ import annotations

from tests.support.conformance import SteppingConformance


class TestHRMText(SteppingConformance):
    system = "hrm_text"
