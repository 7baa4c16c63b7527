"""Inputs are rotated where GPTQ loses less that way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from loopq.quantizers import Problem
from loopq.quantizers.config import LayerConfig
from loopq.quantizers.damping import Damping
from loopq.quantizers.loop_metric import LoopMetric
from loopq.quantizers.turn import compared

CONFIG = LayerConfig.of(bits=3, group_size=16, metric="inputs", levels="uneven")


def problem(loud: float, metric: LoopMetric | None = None) -> Problem:
    """A layer of which one column in sixteen has larger weights than the others: a scale cannot suit both."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, 64))
    weight = (rng.normal(size=(24, 64)) * np.where(np.arange(64) % 16 == 3, loud, 1.0)).astype(np.float32)
    return Problem("x", weight, x.T @ x, CONFIG.grid, threads=1, metric=metric)


def loss(layer, of: Problem) -> float:
    error = layer.dequantize() - of.target
    return float(np.trace(error @ of.hessian @ error.T))


def test_large_columns_are_spread_and_it_pays():
    given = problem(30.0)
    plain = CONFIG.changed(rotation="none").quantize(given)
    layer = CONFIG.quantize(given)
    assert layer.report["rotation"]["block"] == 16
    assert layer.report["rotated_loss"] < 1.0
    assert loss(layer, given) < loss(plain, given)


def test_weights_that_lie_on_the_levels_stay_as_they_are():
    given = problem(1.0)
    given = replace(given, target=CONFIG.changed(method="rtn").quantize(given).dequantize())
    layer = CONFIG.quantize(given)
    assert layer.transform is None
    assert "rotation" not in layer.report
    assert layer.report["rotated_loss"] is None
    assert layer.same_as(CONFIG.changed(rotation="none").quantize(given))


def test_the_loop_metric_decides_where_there_is_one():
    """Large columns that no gradient touches hardly count, so nothing is gained by spreading them."""
    given = problem(30.0)
    silent = np.where(np.arange(64) % 16 == 3, 1e-4, 1.0)
    metric = LoopMetric((np.eye(24),), given.hessian * silent * silent[:, None], 8)
    config = CONFIG.changed(metric="loop")
    assert config.quantize(replace(given, metric=replace(metric, right=given.hessian))).transform is not None
    inputs = given.hessian * silent * silent[:, None]
    assert config.quantize(replace(given, hessian=inputs, metric=metric)).transform is None


def test_a_rotation_that_cannot_be_solved_is_not_taken():
    """Sums of gradients have errors of single precision; here all others are gone from a column of the rotated sum."""
    given = problem(30.0)
    block = np.kron(np.eye(4), np.ones((16, 16)))
    broken = replace(given, hessian=block - 1e-6 * np.eye(64) + 1e-7 * np.diag(np.arange(64)))
    keep, facts = compared(Damping(0.0, "diagonal"), given, broken)
    assert (keep, facts) == (False, {"rotated_loss": None})


@pytest.mark.parametrize(
    "changes", [{"method": "gptq"}, {"method": "rtn"}, {"group_size": 8}, {"levels": "even"}, {"bits": 8}]
)
def test_what_others_read_and_small_groups_are_not_rotated(changes):
    config = LayerConfig.of(**{"method": "gptq-cd", "bits": 3, "group_size": 16, **changes}).decided()
    layer = config.quantize(replace(problem(30.0), settings=config.grid))
    assert layer.transform is None
    assert "rotated_loss" not in layer.report
