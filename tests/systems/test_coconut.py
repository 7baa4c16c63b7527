"""COCONUT: latents between two marks; what every system must show."""

from __future__ import annotations

from tests.support.conformance import Conformance


class TestCoconut(Conformance):
    system = "coconut"
