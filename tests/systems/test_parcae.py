"""Parcae: a state that decays; what every system must show."""

from __future__ import annotations

from tests.support.conformance import SteppingConformance, gradients_are_those_of_the_unrolled_loop


class TestParcae(SteppingConformance):
    system = "parcae"


def test_rollouts_have_the_gradients_of_the_unrolled_loop() -> None:
    gradients_are_those_of_the_unrolled_loop("Parcae")
