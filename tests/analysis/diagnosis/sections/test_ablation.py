"""Sensitivity rankings."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.analysis.diagnosis import rollouts, weights
from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.sections import ablation as sensitivity
from loopq.analysis.diagnosis.sections.ablation import layer_table
from loopq.errors import ConfigError
from loopq.quantizers.config import LayerConfig
from loopq.settings.execution import Execution
from tests.support.looptoys import BlindSystem, LinearLoop, LinearSystem, numpy_rounder, tokens


@pytest.fixture
def system():
    return LinearSystem(LinearLoop(width=8))


def test_gain_of_a_linear_layer_is_norm_over_root_of_width():
    rng = np.random.default_rng(0)
    w = rng.normal(size=(30, 20))
    gain = sensitivity.random_direction_gain(lambda x: x @ w.T + 3.0, rng.normal(size=(500, 20)), n_draws=20)
    assert gain == pytest.approx(np.linalg.norm(w) / np.sqrt(20), rel=0.01)


def test_gain_does_not_depend_on_the_input_of_a_linear_layer():
    w = np.random.default_rng(0).normal(size=(5, 4))
    x = np.random.default_rng(1).normal(size=(50, 4))
    one, other = (sensitivity.random_direction_gain(lambda v: v @ w.T, k * x, seed=3) for k in (1.0, 50.0))
    assert one == pytest.approx(other, rel=1e-6)


def test_gain_of_a_nonlinear_layer_is_taken_at_its_input():
    x = np.random.default_rng(2).normal(3.0, 1.0, size=(7, 5))
    gain = sensitivity.random_direction_gain(np.square, x, n_draws=3, relative=0.5, seed=4)
    draws = np.random.default_rng(4).normal(size=(3, 7, 5)) * 0.5 * np.linalg.norm(x)
    expected = [np.linalg.norm((x + d) ** 2 - x**2) / np.linalg.norm(d) for d in draws]
    assert gain == pytest.approx(np.mean(expected))
    assert sensitivity.random_direction_gain(np.square, x, 1) > 0
    with pytest.raises(ConfigError, match="n_draws must be at least 1; got 0"):
        sensitivity.random_direction_gain(np.square, x, 0)


def test_gain_of_a_layer_is_the_mean_over_prompts(system):
    weight = {p.name: weights.weight_of(system, p) for p in system.shared_parameters(4)}
    gains = sensitivity.gains(system, tokens(), 4, weights=weight, n_draws=2, seed=5)
    for p in system.shared_parameters(4):
        w = weight[p.name].astype(np.float64)
        inputs = sensitivity.last_inputs(system, tokens(), 4, [p], 5)[p.name]
        each = [
            sensitivity.random_direction_gain(lambda x, w=w: x @ w.T, x, 2, seed=5 + i)
            for i, x in enumerate(inputs)
        ]
        assert gains[p.name] == pytest.approx(np.mean(each), rel=1e-12)
        assert len(each) == 3


def test_two_layers_have_no_rank_correlation():
    measures = {"ablation": {"a": 0.1, "b": 0.5}, "trace": {"a": 9.0, "b": None}}
    table = sensitivity.rank_table(measures, "ablation")
    assert table["spearman"] == {"ablation": None, "trace": None}
    assert table["places"] == {"a": {"ablation": 2, "trace": 1}, "b": {"ablation": 1, "trace": None}}


def test_gains_of_a_system_use_the_last_invocation(system):
    parameters = system.shared_parameters(4)
    inputs = sensitivity.last_inputs(system, tokens(), 4, parameters)
    (batch,) = tokens().batches(8)
    states = rollouts.trace(system, batch, 4).states
    np.testing.assert_allclose(inputs["adapter.weight"][1][:, :8], states[3][1].numpy())
    gains = sensitivity.gains(
        system, tokens(), 4, weights={p.name: weights.weight_of(system, p) for p in parameters}
    )
    assert set(gains) == {"adapter.weight", "core.weight"}


def test_ties_keep_the_order_of_the_layers():
    assert sensitivity.places({"a": 1.0, "b": 2.0, "c": 1.0, "d": None}) == {
        "a": 2,
        "b": 1,
        "c": 3,
        "d": None,
    }


def test_rank_table_holds_measures_against_the_truth():
    measures = {
        "ablation": {"a": 0.1, "b": 0.5, "c": 0.3},
        "trace": {"a": 9.0, "b": 1.0, "c": 5.0},
        "gain": {"a": 1.0, "b": 1.0, "c": 1.0},
    }
    table = sensitivity.rank_table(measures, "ablation")
    assert table["places"]["b"] == {"ablation": 1, "trace": 3, "gain": 2}
    assert table["spearman"]["ablation"] == pytest.approx(1.0)
    assert table["spearman"]["trace"] == pytest.approx(-1.0)
    assert table["spearman"]["gain"] is None
    # A layer that one measure leaves out has no place there, and is left out of that correlation.
    measures["ablation"]["d"] = 0.9
    table = sensitivity.rank_table(measures, "ablation")
    assert table["places"]["d"] == {"ablation": 1, "trace": None, "gain": None}
    assert table["spearman"]["trace"] == pytest.approx(-1.0)


INT4 = LayerConfig.of(bits=4, group_size=-1)


def test_ablation_says_what_the_output_loses(system):
    data = tokens(n_prompts=3, n_tokens=12)
    ablations = sensitivity.ablation(
        Context(system, data, 6, rounder=numpy_rounder, execution=Execution(seed=2, batch_size=2)), INT4
    )
    assert list(ablations) == ["adapter.weight", "core.weight"]
    for p in system.shared_parameters(6):
        new = weights.rounded(system, [p], INT4, numpy_rounder)
        run = rollouts.run_variants(Context(system, data, 6, execution=Execution(seed=2)), {"a": new})["a"]
        assert ablations[p.name]["output_error"] == pytest.approx(run.curve("output_error").mean())
        assert ablations[p.name]["output_error_last"] == pytest.approx(run.curve("output_error")[-1])
        assert ablations[p.name]["kl_last"] == pytest.approx(run.curve("kl")[-1])
    few = sensitivity.ablation(Context(system, data, 6, rounder=numpy_rounder), INT4, parameters=[p])
    assert list(few) == ["core.weight"]


def test_layer_table_has_gain_at_half_depth_and_trace_of_squares(system, monkeypatch):
    """A linear layer has the same gain for every input, so the requested inputs determine the depth."""
    monkeypatch.setattr(sensitivity, "random_direction_gain", lambda f, x, n, seed: np.linalg.norm(x))
    data, config = tokens(n_prompts=2), DiagnoseConfig(n_ablation_prompts=2)
    context = Context(system, data, 8, config, numpy_rounder, Execution(seed=3, threads=1))
    row = layer_table(context)["layers"]["adapter.weight"]
    (batch,) = data.batches(8, 3)
    embedding = system.embed(batch).detach().numpy()
    states = rollouts.trace(system, batch, 8).states
    inputs = [np.concatenate([s.numpy(), embedding], -1) for s in states[:8]]
    assert row["trace"] == pytest.approx(sum(np.square(x).sum() for x in inputs), rel=1e-5)
    # A rollout of half the depth reads the state of step 3 last.
    assert row["gain"] == pytest.approx(np.mean([np.linalg.norm(x) for x in inputs[3]]))


def test_ablation_of_an_unchanged_layer_is_zero(system):
    ablations = sensitivity.ablation(Context(system, tokens(), 4, rounder=lambda w, c: w), INT4)
    # The toy's weights are float64 and pass through float32: top-1 does not change.
    assert ablations["core.weight"]["changed"] == 0.0
    assert ablations["core.weight"]["kl_last"] < 1e-9


def test_ablation_averages_over_all_steps(system):
    data = tokens(n_prompts=4, n_tokens=30)
    ablated = sensitivity.ablation(Context(system, data, 6, rounder=numpy_rounder), INT4)["adapter.weight"]
    new = weights.rounded(system, system.shared_parameters(6)[:1], INT4, numpy_rounder)
    run = rollouts.run_variants(Context(system, data, 6), {"a": new})["a"]
    assert ablated["changed"] == pytest.approx(1 - run.agreement.mean())
    assert ablated["changed_last"] == pytest.approx(1 - run.agreement[:, -1].mean())
    assert ablated["changed"] > 0
    blind = sensitivity.ablation(Context(BlindSystem(LinearLoop()), data, 6, rounder=numpy_rounder), INT4)
    assert blind["adapter.weight"]["changed"] == blind["adapter.weight"]["changed_last"]
