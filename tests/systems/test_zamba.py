"""Zamba: one block that is called between Mamba layers; what every system must show."""

from __future__ import annotations

from tests.support.conformance import Conformance


class TestZamba(Conformance):
    system = "zamba"
