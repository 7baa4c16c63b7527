"""Settings of a run: presets, overrides, plain data."""

from __future__ import annotations

import json

import pytest

import loopq
from loopq.errors import ConfigError
from loopq.quantizers.config import Override
from loopq.run.budget import Fit
from loopq.run.config import PRESETS, QuantConfig, flat_names
from tests.support.runs import digest


def test_overrides_apply_in_order_and_survive_json():
    config = QuantConfig.of(
        Override("*adapter*", {"bits": 8, "steps": "first"}),
        Override("re:mlp\\.(fc|proj)", {"group_size": 32}),
        Override("*adapter*", {"bits": 3}),
    )
    layer = config.for_layer("transformer.adapter.weight")
    assert (layer.grid.bits, layer.calibration.steps) == (3, "first")
    layer = config.for_layer("transformer.core_block.0.mlp.fc.weight")
    assert (layer.grid.group_size, layer.grid.bits, layer.calibration.steps) == (32, 4, "all")
    assert QuantConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_a_preset_sets_its_fields_and_leaves_the_others():
    base = QuantConfig.of(bits=3, damping=0.02, steps="1:")
    config = base.preset("best")
    assert {k: config.flat()[k] for k in PRESETS["best"]} == PRESETS["best"]
    assert config.layer.method.damping.fraction == 0.02
    assert (config.layer.grid.bits, config.layer.calibration.steps) == (3, "1:")
    assert QuantConfig.of(preset="best", bits=3, damping=0.02, steps="1:") == config
    with pytest.raises(ConfigError, match="preset must be one of best, small, fast, paper; got 'good'"):
        base.preset("good")


@pytest.mark.slow
def test_a_preset_is_its_settings_and_keywords_win_over_it(loaded, tokens, tmp_path):
    few, grid = tokens.take(0, 3), {"bits": 3, "group_size": 20}
    loopq.quantize(loaded, few, out=tmp_path / "preset", preset="best", **grid)
    loopq.quantize(
        loaded,
        few,
        out=tmp_path / "fields",
        method="gptq-cd",
        metric="loop",
        metric_draws=4,
        beam=64,
        rounds=4,
        inputs="asymmetric",
        levels="auto",
        **grid,
    )
    assert digest(tmp_path / "preset") == digest(tmp_path / "fields")
    plain = loopq.quantize(loaded, few, preset="best", metric="inputs", **grid)
    layer = QuantConfig.from_json(plain.settings["quantization"]).layer
    assert (layer.method.name, layer.method.metric.kind) == ("gptq-cd", "inputs")
    assert layer.method.damping.kind == "diagonal"


@pytest.mark.parametrize("preset", [None, "best"])
def test_native_files_alone_have_a_table_of_levels(preset):
    best = QuantConfig.of(preset=preset)
    for changes, name in (
        ({}, "table"), ({"bits": 3}, "table"), ({"bits": 8}, "integer"), ({"symmetric": False}, "asymmetric"),
    ):  # fmt: skip
        changed = best.changed(**changes)
        assert changed.for_layer("any").grid.make().name == name
        assert changed.for_format(native=True) == changed
        assert changed.for_format(native=False).layer.grid.levels == "even"
    one = QuantConfig.of(Override("*", {"levels": "auto"})).for_format(native=False)
    assert [o.changes for o in one.overrides] == [{"levels": "even"}]
    assert best.changed(levels="fitted").for_format(native=False).layer.grid.levels == "fitted"


@pytest.mark.parametrize("method", ["rtn", "gptq", "trellis"])
def test_other_methods_have_even_levels_by_default(method):
    config = QuantConfig.of(Override("a.*", {"method": "gptq-cd"}), method=method)
    assert config.for_layer("b.weight").grid.levels == "even"
    assert config.for_layer("a.weight").grid.levels == "uneven"
    assert config.preset("fast").for_layer("a.weight").grid.levels == "even"


def test_every_keyword_of_a_run_is_a_flat_name():
    assert {
        "bits",
        "method",
        "damping",
        "metric_draws",
        "fit_bits",
        "fit",
        "alpha",
        "layer",
    } <= flat_names()


def test_plain_data_that_is_damaged_is_refused():
    data = QuantConfig.of(Override("a*", {"bits": 8}), fit=Fit(3.5)).to_json()
    assert QuantConfig.from_json(json.loads(json.dumps(data))).to_json() == data
    for change, match in [
        ({"colour": 1}, "QuantConfig: expected an object with the keys .*; got .*colour"),
        ({"layer": 5}, "LayerConfig: expected an object"),
        ({"layer": None}, "layer must be LayerConfig; got None"),
        ({"inputs": {"name": "both"}}, "unknown inputs 'both'"),
        ({"overrides": [{"pattern": "*"}]}, "override: expected an object with a pattern and changes"),
        ({"fit": {"bits": [2]}}, "Fit: expected an object"),
        ({"rank_threshold": "small"}, "rank_threshold must be a finite number or None; got 'small'"),
    ]:
        with pytest.raises(ConfigError, match=match):
            QuantConfig.from_json(data | change)
    del data["inputs"]
    with pytest.raises(ConfigError, match="QuantConfig: expected an object"):
        QuantConfig.from_json(data)
