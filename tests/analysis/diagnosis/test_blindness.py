"""Blindness judged by what a one-step solution loses over the trajectory."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.analysis.diagnosis import verdict
from loopq.analysis.diagnosis.blindness import ALL, ONE, RTN, model_ratio, solved_losses
from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.weights import core_rounder
from tests.support.hessians import ArrayHessians

GRID = DiagnoseConfig(bits=3, group_size=16).layer(16)


def problem(narrow: bool, seed: int = 0):
    """A layer with three directions at step 0, or as many as at the later steps."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(24, 32)).astype(np.float32)
    base = rng.normal(size=(32, 32)) / 6
    rows = [rng.normal(size=(200, 32)) @ base + 0.3 * rng.normal(size=(200, 32)) for _ in range(4)]
    if narrow:
        rows[0] = rng.normal(size=(200, 3)) @ rng.normal(size=(3, 32))
        rows[1:] = [3 * rng.normal(size=(200, 32)) for _ in range(3)]
    return weight, ArrayHessians.of_rows(rows)


@pytest.mark.parametrize("narrow", [True, False])
def test_a_layer_is_blind_where_one_step_is_worse_than_rounding(narrow: bool) -> None:
    weight, hessians = problem(narrow)
    losses = solved_losses(weight, hessians, GRID, 0.01, core_rounder, threads=1)
    assert losses is not None
    total = hessians.matrix([0, 1, 2, 3])
    error = core_rounder(weight, GRID) - weight
    assert losses[RTN] == pytest.approx(float(np.trace(error @ total @ error.T)), rel=1e-5)
    assert losses[ALL] < losses[RTN]
    assert losses[ALL] < losses[ONE]
    layer = {"role": "mlp", "exposed": False, "treatment": "gptq", "reason": "", "solved": losses}
    judged = verdict.judge(layer, None)
    assert judged["blind"] is (losses[ONE] > losses[RTN]) is narrow
    assert ("misleads the solver" in judged["text"]) is narrow


def test_one_step_has_no_later_steps_to_miss() -> None:
    weight, _ = problem(False)
    assert solved_losses(weight, ArrayHessians.of_rows([np.eye(32)]), GRID, 0.01, core_rounder) is None
    two = solved_losses(weight, ArrayHessians.of_rows([np.eye(32)] * 2), GRID, 0.01, core_rounder)
    assert two is not None
    # Both steps have the same inputs: one shows the solver all there is.
    assert two[ONE] == pytest.approx(two[ALL])


def test_a_model_is_judged_by_the_geometric_mean() -> None:
    losses = [{RTN: 1.0, ONE: 4.0, ALL: 0.5}, None, {RTN: 2.0, ONE: 2.0, ALL: 1.0}]
    assert model_ratio(losses, ONE, RTN) == pytest.approx(2.0)
    nothing = [{RTN: 1.0, ONE: 0.0, ALL: 0.0}, {RTN: 0.0, ONE: 1.0, ALL: 0.0}]
    assert model_ratio([*losses, *nothing], ONE, RTN) == pytest.approx(2.0)
    assert model_ratio([None], ONE, RTN) is None
    assert model_ratio([{RTN: 0.01, ONE: 0.02, ALL: 0.01}], ONE, RTN) == pytest.approx(2.0)
    layers = [
        {"name": n, "verdict": {"blind": None, "dominated": None, "exposed": False}, "solved": x}
        for n, x in zip("abc", losses, strict=True)
    ]
    assert any(
        "one-step calibration is worse than rounding: 2.00 times" in line for line in verdict.summary(layers)
    )
