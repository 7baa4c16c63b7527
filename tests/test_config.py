"""Settings are read strictly, and every refusal lists what is allowed."""

from __future__ import annotations

import json

import pytest
from loopq.config import PRESETS, LayerConfig, Override, QuantConfig, parse_steps, preset

from loopq.errors import ConfigError


@pytest.mark.parametrize(
    ("spec", "steps"),
    [
        ("all", [0, 1, 2, 3]),
        ("first", [0]),
        ("0:2", [0, 1]),
        (":2", [0, 1]),
        ("1:", [1, 2, 3]),
        ("3", [3]),
        ("0,2:4", [0, 2, 3]),
        ("2,0", [0, 2]),
    ],
)
def test_parse_steps(spec, steps):
    assert parse_steps(spec, 4) == steps


@pytest.mark.parametrize("spec", ["4", "0:5", "2:2", "3:1", "", "last", "-1", "1:x", "0,9"])
def test_parse_steps_refuses(spec):
    with pytest.raises(ConfigError, match="steps"):
        parse_steps(spec, 4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bits", 5),
        ("bits", 16),
        ("group_size", 0),
        ("group_size", -2),
        ("group_size", 64.0),
        ("damping", -0.1),
        ("damping", float("nan")),
        ("scales", "best"),
        ("scale_search", "l1"),
        ("scale_dtype", "int8"),
        ("precision", "float16"),
        ("block_size", 0),
    ],
)
def test_layer_config_refuses(field, value):
    with pytest.raises(ConfigError, match=field):
        LayerConfig(**{field: value})


def test_overrides_apply_in_order_and_survive_json():
    config = QuantConfig(
        overrides=(
            Override("*adapter*", {"bits": 8, "steps": "first"}),
            Override("re:mlp\\.(fc|proj)", {"group_size": 32}),
            Override("*adapter*", {"bits": 3}),
        )
    )
    layer, steps = config.for_layer("transformer.adapter.weight")
    assert (layer.bits, steps) == (3, "first")
    layer, steps = config.for_layer("transformer.core_block.0.mlp.fc.weight")
    assert (layer.group_size, layer.bits, steps) == (32, 4, "all")
    assert QuantConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_override_refuses_unknown_setting():
    with pytest.raises(ConfigError, match="colour"):
        Override("*", {"colour": 3})


def test_a_preset_sets_its_fields_and_leaves_the_others():
    base = QuantConfig(LayerConfig(bits=3, damping=0.02), steps="1:")
    found = preset("best", base)
    assert {k: getattr(found.layer, k) for k in PRESETS["best"]} == PRESETS["best"]
    assert (found.layer.bits, found.layer.damping, found.steps) == (3, 0.02, "1:")
    with pytest.raises(ConfigError, match="preset must be one of best; got 'good'"):
        preset("good")
