"""Settings of a diagnosis."""

from __future__ import annotations

import pytest

from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"seeds": ()}, "at least one initial state"),
        ({"group_sizes": (32, 0)}, "at least 1; got 0"),
        ({"n_prompts": 0}, "n_prompts"),
        ({"bits": 99}, "bits"),
    ],
)
def test_settings_that_cannot_be(changes, match):
    with pytest.raises(ConfigError, match=match):
        DiagnoseConfig(**changes)


def test_layers_are_rounded_by_maximum_at_the_given_group_size():
    layer = DiagnoseConfig(bits=3).layer(64)
    assert (layer.grid.bits, layer.grid.group_size) == (3, 64)
    assert layer.method.name == "rtn"
