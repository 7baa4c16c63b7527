"""The section of ablation: what each layer costs the output."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.diagnosis import rollouts, sensitivity, weights
from loopq.diagnosis.config import DiagnoseConfig
from loopq.diagnosis.context import Context
from loopq.diagnosis.sections.ablation import ablation
from loopq.quantizers.config import LayerConfig
from loopq.settings.execution import Execution
from tests.support.looptoys import BlindSystem, LinearLoop, LinearSystem, numpy_rounder, tokens

INT4 = LayerConfig.of(bits=4, group_size=-1)


@pytest.fixture
def system():
    return LinearSystem(LinearLoop(width=8))


def test_ablation_says_what_the_output_loses(system):
    data = tokens(n_prompts=3, n_tokens=12)
    found = sensitivity.ablation(
        Context(system, data, 6, rounder=numpy_rounder, execution=Execution(seed=2, batch_size=2)), INT4
    )
    assert list(found) == ["adapter.weight", "core.weight"]
    for p in system.shared_parameters(6):
        new = weights.rounded(system, [p], INT4, numpy_rounder)
        run = rollouts.run_variants(Context(system, data, 6, execution=Execution(seed=2)), {"a": new})["a"]
        assert found[p.name]["output_error"] == pytest.approx(run.curve("output_error").mean())
        assert found[p.name]["output_error_last"] == pytest.approx(run.curve("output_error")[-1])
        assert found[p.name]["kl_last"] == pytest.approx(run.curve("kl")[-1])
    few = sensitivity.ablation(Context(system, data, 6, rounder=numpy_rounder), INT4, parameters=[p])
    assert list(few) == ["core.weight"]


def test_layer_table_has_gain_at_half_depth_and_trace_of_squares(system, monkeypatch):
    """A linear layer has the same gain for every input, so the requested inputs determine the depth."""
    monkeypatch.setattr(sensitivity, "random_direction_gain", lambda f, x, n, seed: np.linalg.norm(x))
    data, config = tokens(n_prompts=2), DiagnoseConfig(n_ablation_prompts=2)
    context = Context(system, data, 8, config, numpy_rounder, Execution(seed=3, threads=1))
    found = ablation(context)["layers"]["adapter.weight"]
    (batch,) = data.batches(8, 3)
    embedding = system.embed(batch).detach().numpy()
    states = rollouts.trace(system, batch, 8).states
    inputs = [np.concatenate([s.numpy(), embedding], -1) for s in states[:8]]
    assert found["trace"] == pytest.approx(sum(np.square(x).sum() for x in inputs), rel=1e-5)
    # A rollout of half the depth reads the state of step 3 last.
    assert found["gain"] == pytest.approx(np.mean([np.linalg.norm(x) for x in inputs[3]]))


def test_ablation_of_an_unchanged_layer_is_zero(system):
    found = sensitivity.ablation(Context(system, tokens(), 4, rounder=lambda w, c: w), INT4)
    # The toy's weights are float64 and pass through float32: top-1 does not change.
    assert found["core.weight"]["changed"] == 0.0
    assert found["core.weight"]["kl_last"] < 1e-9


def test_ablation_averages_over_all_steps(system):
    data = tokens(n_prompts=4, n_tokens=30)
    found = sensitivity.ablation(Context(system, data, 6, rounder=numpy_rounder), INT4)["adapter.weight"]
    new = weights.rounded(system, system.shared_parameters(6)[:1], INT4, numpy_rounder)
    run = rollouts.run_variants(Context(system, data, 6), {"a": new})["a"]
    assert found["changed"] == pytest.approx(1 - run.agreement.mean())
    assert found["changed_last"] == pytest.approx(1 - run.agreement[:, -1].mean())
    assert found["changed"] > 0
    blind = sensitivity.ablation(Context(BlindSystem(LinearLoop()), data, 6, rounder=numpy_rounder), INT4)
    assert blind["adapter.weight"]["changed"] == blind["adapter.weight"]["changed_last"]
