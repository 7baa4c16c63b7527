"""The treatment of each layer: overrides, treatments, steps."""

from __future__ import annotations

import dataclasses

import pytest

import loopq
from loopq.calibrate.data import from_ids
from loopq.errors import ConfigError
from loopq.quantizers.config import Override
from loopq.quantizers.rtn import RTN
from loopq.run.config import QuantConfig
from loopq.run.model_source import ModelSource
from loopq.run.plan import Plan, rounding_like
from tests.support.runs import SETTINGS, run_of
from tests.support.systems import CASES, open_system, prompts


def test_layers_may_choose_their_own_steps(loaded, tokens):
    config = QuantConfig.of(
        Override("*adapter*", {"steps": "first", "bits": 8}), Override("*.1.*", {"method": "rtn"})
    )
    result = loopq.quantize(loaded, tokens, config, **SETTINGS)
    reports = {name: layer.report for name, layer in result.layers.items()}
    adapter = reports["transformer.adapter.weight"]
    assert (adapter["steps"], adapter["bits"], adapter["method_done"]) == ([0], 8, "gptq")
    assert reports["transformer.core_block.0.mlp.fc.weight"]["steps"] == [0, 1, 2]
    assert reports["transformer.core_block.1.mlp.fc.weight"]["method_done"] == "rtn"
    alone = loopq.quantize(loaded, tokens, preset="paper", steps="first", group_size=20, bits=8)
    assert result.layers["transformer.adapter.weight"].same_as(alone.layers["transformer.adapter.weight"])
    with pytest.raises(ConfigError, match="matches no shared parameter"):
        loopq.quantize(loaded, tokens, QuantConfig.of(Override("nowhere", {"bits": 8})))


def test_treatments_of_the_system_and_dense_layers(tiny, tokens):
    run = run_of(tiny, tokens)
    first, second, *rest = run.job.selection.parameters
    parameters = [
        dataclasses.replace(first, treatment="rtn", reason="outside the loop"),
        dataclasses.replace(second, treatment="dense", reason="excluded by pattern"),
        *rest,
    ]
    config = QuantConfig.of(Override(f"*{rest[0].name}", {"method": "dense"}), method="gptq")
    tasks = Plan.of(parameters, run.job.selection.input_groups, config).tasks
    assert [t.name for t in tasks] == [first.name, *(p.name for p in rest[1:])]
    assert (tasks[0].config.method, tasks[0].steps, tasks[0].input_group) == (RTN(), (), None)
    with pytest.raises(ConfigError, match="nothing is left to quantize"):
        Plan.of(parameters, {}, QuantConfig.of(method="dense"))


def test_rounding_has_the_scale_search_of_the_method():
    for method, search in (("gptq", "mse"), ("rtn", "mse")):
        layer = QuantConfig.of(method=method, scale_search=search).layer
        assert rounding_like(layer) == RTN(scale_search="mse")
    assert rounding_like(QuantConfig.of(method="gptq-cd").layer) == RTN()


def test_a_setting_unused_by_a_layers_method_is_refused(tiny, tokens):
    config = QuantConfig.of(Override("*adapter*", {"damping": 0.1}), method="rtn")
    with pytest.raises(
        ConfigError,
        match=r"override '\*adapter\*', layer transformer\.adapter\.weight: damping goes with method gptq or "
        r"gptq-cd or trellis; method rtn would not read it",
    ):
        loopq.quantize(tiny, tokens, config)


def test_layers_that_the_paper_rounds_are_calibrated_otherwise():
    system = open_system(CASES["Nanbeige"])
    tokens = from_ids(prompts(CASES["Nanbeige"], 2).input_ids.tolist())
    name, source = "lm_head.weight", ModelSource.of(system, tokens)
    for method in ("gptq", "rtn"):
        plan = source.plan(QuantConfig.of(method=method, group_size=16))
        head = next(t for t in plan.tasks if t.name == name)
        assert (type(head.config.method), head.input_group) == (RTN, None)
    plan = source.plan(QuantConfig.of(group_size=16))
    head = next(t for t in plan.tasks if t.name == name)
    assert (head.config.method.name, head.input_group, head.steps) == ("gptq-cd", name, (0,))
    layer = loopq.quantize(system, tokens, group_size=16, preset="fast").layers[name]
    assert layer.report["method_done"] == "gptq-cd"


def test_an_override_calibrates_a_layer_that_the_run_rounds():
    system = open_system(CASES["Nanbeige"])
    tokens = from_ids(prompts(CASES["Nanbeige"], 2).input_ids.tolist())
    config = QuantConfig.of(Override("lm_head*", {"method": "gptq-cd"}), preset="paper", group_size=16)
    assert loopq.quantize(system, tokens, config).layers["lm_head.weight"].report["method_done"] == "gptq-cd"
