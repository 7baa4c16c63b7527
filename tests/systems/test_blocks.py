"""Transformer blocks read out of modules: what is not known is not described."""

from __future__ import annotations

import pytest

from tests.support.looped import looped


@pytest.mark.parametrize("changed", [{"sliding_window": 4}, {"hidden_act": "gelu"}])
def test_blocks_of_other_attention_or_activation_lack_programs(changed):
    assert looped("Mistral", sliding_window=None).program(2) is not None
    assert looped("Mistral", **{"sliding_window": None, **changed}).program(2) is None


def test_positions_that_depend_on_the_length_are_not_described():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert looped("Llama", rope_parameters=rope).program(2) is None
