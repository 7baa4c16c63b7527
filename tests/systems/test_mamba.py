"""Mamba: no loop over depth, one over tokens; what every system must show."""

from __future__ import annotations

from tests.support.conformance import Conformance


class TestMamba(Conformance):
    system = "mamba"
