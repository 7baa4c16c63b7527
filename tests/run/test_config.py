"""Settings of a run: presets, overrides, plain data of this version and of the first."""

from __future__ import annotations

import json

import pytest

import loopq
from loopq.errors import ConfigError
from loopq.gradients.tuner import Tune
from loopq.quantizers.config import LayerConfig, Override
from loopq.run.allocate import Allocate
from loopq.run.asymmetric import Asymmetric
from loopq.run.config import PRESETS, QuantConfig, flat_names
from tests.golden.quantized import HERE
from tests.support.runs import digest

VERSION_1 = json.loads((HERE / "loopq-v1.json").read_text())["settings"]["quantization"]


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
    found = base.preset("best")
    assert {k: found.flat()[k] for k in PRESETS["best"]} == PRESETS["best"]
    assert found.layer.method.damping.fraction == 0.02
    assert (found.layer.grid.bits, found.layer.calibration.steps) == (3, "1:")
    assert QuantConfig.of(preset="best", bits=3, damping=0.02, steps="1:") == found
    with pytest.raises(ConfigError, match="preset must be one of best, fast, paper; got 'good'"):
        base.preset("good")


def test_a_preset_is_its_settings_and_keywords_win_over_it(loaded, tokens, tmp_path):
    few, grid = tokens.take(0, 3), {"bits": 3, "group_size": 20}
    loopq.quantize(loaded, few, out=tmp_path / "preset", preset="best", **grid)
    loopq.quantize(
        loaded,
        few,
        out=tmp_path / "fields",
        method="gptq-cd",
        metric="loop",
        metric_prompts=128,
        metric_draws=4,
        inputs="asymmetric",
        **grid,
    )
    assert digest(tmp_path / "preset") == digest(tmp_path / "fields")
    plain = loopq.quantize(loaded, few, preset="best", metric="inputs", **grid)
    layer = QuantConfig.from_json(plain.settings["quantization"]).layer
    assert (layer.method.name, layer.method.metric.kind) == ("gptq-cd", "inputs")
    assert layer.method.damping.kind == "diagonal"


def test_every_keyword_of_a_run_is_a_flat_name():
    assert {
        "bits",
        "method",
        "damping",
        "metric_draws",
        "tune_every",
        "allocate",
        "alpha",
        "layer",
    } <= flat_names()


def test_settings_of_version_1_mean_the_same():
    """`loopq-v1.json` is the index of a checkpoint that the first version wrote."""
    config = QuantConfig.from_json(VERSION_1)
    assert config.inputs == Asymmetric(alpha=0.5, sweeps=2)
    assert (config.include, config.exclude) == ((), ("v.weight",))
    assert (config.rank_threshold, config.n_held_out, config.allocate, config.tune) == (None,) * 4
    common = {"bits": 3, "group_size": 16, "damping": 0.02, "damping_kind": "diagonal", "scale_bits": 10}
    run = {"method": "gptq-cd", "metric": "loop", "metric_draws": 2, "passes": 2, **common}
    run |= {"metric_prompts": 1 << 31, "rounds": 8}
    weighed = {"steps": "1:", "step_weights": "alpha=1/4"}
    expected = {
        "adapter.weight": run | {"bits": 8, "steps": "first", "step_weights": "sum"},
        "q.weight": common | weighed | {"method": "gptq", "scales": "static", "scale_search": "max"},
        "k.weight": common | weighed | {"method": "gptq", "scales": "static", "scale_search": "max"},
        "fc.weight": run | weighed | {"metric": "inputs", "rotation": "hadamard:8"},
        "proj.weight": run | weighed,
    }
    for name, changes in expected.items():
        assert config.for_layer(name) == LayerConfig.of(**changes), name
    assert QuantConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_version_1_kept_settings_of_every_method_beside_each_other():
    layer = VERSION_1["layer"] | {"method": "gptq", "metric": "inputs", "descent": 7}
    data = VERSION_1 | {
        "layer": layer,
        "inputs": "open",
        "overrides": [
            {"pattern": "*", "changes": {"method": "full"}},
            {"pattern": "k*", "changes": {"rounds": 3}},
            {"pattern": "q*", "changes": {"method": "rtn", "damping": 0.5, "bits": 2}},
        ],
    }
    config = QuantConfig.from_json(data)
    assert config.layer.method.name == "gptq"
    assert config.inputs.name == "open"
    found = config.for_layer("fc.weight").method
    assert (found.name, found.descent, found.passes, found.metric.draws) == ("gptq-cd", 7, 2, 2)
    assert (found.damping.fraction, found.damping.kind) == (0.02, "diagonal")
    assert config.for_layer("k.weight").method.rounds == 3
    assert (
        config.for_layer("q.weight").flat()
        == LayerConfig.of(
            method="rtn",
            scale_search="max",
            bits=2,
            group_size=16,
            scale_bits=10,
            steps="1:",
            step_weights="alpha=1/4",
        ).flat()
    )


def test_plain_data_that_is_damaged_is_refused():
    data = QuantConfig.of(Override("a*", {"bits": 8}), allocate=Allocate(3.5), tune=Tune()).to_json()
    assert QuantConfig.from_json(json.loads(json.dumps(data))).to_json() == data
    for change, match in [
        ({"colour": 1}, "QuantConfig: expected an object with the keys .*; got .*colour"),
        ({"layer": 5}, "LayerConfig: expected an object"),
        ({"layer": None}, "layer must be LayerConfig; got None"),
        ({"inputs": {"name": "both"}}, "unknown inputs 'both'"),
        ({"overrides": [{"pattern": "*"}]}, "override: expected an object with a pattern and changes"),
        ({"tune": {"what": "all"}}, "Tune: expected an object"),
        ({"rank_threshold": "small"}, "rank_threshold must be a finite number or None; got 'small'"),
    ]:
        with pytest.raises(ConfigError, match=match):
            QuantConfig.from_json(data | change)
    del data["inputs"]
    with pytest.raises(ConfigError, match="QuantConfig: expected an object"):
        QuantConfig.from_json(data)
