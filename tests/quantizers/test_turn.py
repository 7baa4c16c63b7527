"""Inputs are rotated where GPTQ loses less that way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from loopq.quantizers import Problem
from loopq.quantizers.config import LayerConfig
from loopq.quantizers.loop_metric import LoopMetric

CONFIG = LayerConfig.of(bits=3, group_size=16, metric="inputs", levels="even")


def problem(loud: float, metric: LoopMetric | None = None) -> Problem:
    """A layer of which one input in sixteen is louder than the others, and its columns smaller, as after training."""
    rng = np.random.default_rng(0)
    energy = np.where(np.arange(64) % 16 == 3, loud, 1.0)
    x = rng.normal(size=(512, 64)) * energy
    weight = (rng.normal(size=(24, 64)) / np.sqrt(energy)).astype(np.float32)
    return Problem("x", weight, x.T @ x, CONFIG.grid, threads=1, metric=metric)


def loss(layer, of: Problem) -> float:
    error = layer.dequantize() - of.target
    return float(np.trace(error @ of.hessian @ error.T))


def test_loud_inputs_are_rotated_and_it_pays():
    given = problem(30.0)
    plain = CONFIG.changed(rotation="none").quantize(given)
    layer = CONFIG.quantize(given)
    assert layer.report["rotation"]["block"] == 16
    assert layer.report["rotated_loss"] < 1.0
    assert loss(layer, given) < loss(plain, given)


def test_inputs_alike_stay_as_they_are():
    given = problem(1.0)
    layer = CONFIG.quantize(given)
    assert layer.transform is None
    assert "rotation" not in layer.report
    assert layer.report["rotated_loss"] > 1.0
    assert layer.same_as(CONFIG.changed(rotation="none").quantize(given))


def test_the_loop_metric_decides_where_there_is_one():
    """By its inputs alone the layer would not be rotated. The gradients have the loud channels."""
    quiet, loud = problem(1.0), problem(30.0)
    metric = LoopMetric((np.eye(24),), 1e3 * loud.hessian, 8)
    layer = CONFIG.changed(metric="loop").quantize(replace(loud, hessian=quiet.hessian, metric=metric))
    assert layer.transform is not None


@pytest.mark.parametrize("changes", [{"method": "gptq"}, {"method": "rtn"}, {"group_size": 8}])
def test_other_methods_and_small_groups_are_not_rotated(changes):
    config = LayerConfig.of(**{"method": "gptq-cd", "bits": 3, "group_size": 16, **changes})
    layer = config.quantize(replace(problem(30.0), settings=config.grid))
    assert layer.transform is None
    assert "rotated_loss" not in layer.report
