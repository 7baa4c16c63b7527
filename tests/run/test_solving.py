"""Layers solved from a model and from sums of its steps."""

from __future__ import annotations

import pytest

import loopq
from loopq.calibrate.hessian_dump import collect_hessians
from loopq.settings.steps import parse_steps
from tests.support.runs import SETTINGS, job_of


@pytest.mark.parametrize("steps", ["first", "0:2", "2", "1:", "all"])
def test_every_choice_of_steps_is_recorded_and_equals_its_dump(loaded, tokens, tmp_path, steps):
    result = loopq.quantize(loaded, tokens, steps=steps, **SETTINGS)
    dump = tmp_path / "dump"
    collect_hessians(job_of(loaded, tokens), dump, per_step=True)
    again = loopq.solve(dump, steps=steps, **SETTINGS)
    for name, layer in result.layers.items():
        assert layer.same_as(again.layers[name])
        assert layer.report["steps"] == parse_steps(steps, 3)
        assert layer.report["n_rows"] == 240 * len(layer.report["steps"])
    config = loopq.QuantConfig.from_json(result.settings["quantization"])
    assert config.layer.calibration.steps == steps
