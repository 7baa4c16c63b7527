"""Prelude, adapter, core and coda, common to Huginn and R-Llama."""

from __future__ import annotations

import pytest

from tests.support.conformance import gradients_are_those_of_the_unrolled_loop


@pytest.mark.parametrize("name", ["Huginn", "R-Llama"])
def test_rollouts_have_the_gradients_of_the_unrolled_loop(name: str) -> None:
    gradients_are_those_of_the_unrolled_loop(name)
