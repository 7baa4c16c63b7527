"""Displacements on a linear loop, against closed forms."""

import numpy as np
import pytest
import torch

from loopq.analysis.diagnosis import rollouts
from loopq.analysis.diagnosis.context import Context
from loopq.errors import ConfigError
from loopq.paper.diagnosis import displacement
from loopq.quantizers.config import LayerConfig
from loopq.settings.execution import Execution
from tests.support.looptoys import BlindSystem, LinearLoop, LinearSystem, tokens, under

INT4 = LayerConfig.of(bits=4, group_size=-1)


def test_displacement_converges_to_its_closed_form(system):
    # (I - J^)^-1 (J^ s* + b^ - s*): for a changed J and b the new fixed point minus the old one.
    new = {"adapter.weight": (system.model.adapter.weight.detach() * 1.1).float().numpy()}
    data = tokens(n_prompts=2)
    moved = displacement.displacement(Context(system, data, 200), new, n_more=200)
    j, jq = system.model.jacobian(), system.model.jacobian(new["adapter.weight"])
    eye = np.eye(6)
    for prompt, ids in enumerate(data.sequences):
        b, bq = system.model.drive(ids), system.model.drive(ids, new["adapter.weight"])
        star = np.linalg.solve(eye - j, b.T).T
        expected = np.linalg.solve(eye - jq, (star @ (jq - j).T + bq - b).T)
        assert moved.distance[prompt, -1] == pytest.approx(np.linalg.norm(expected), rel=1e-9)


def test_displacement_settles_at_the_spectral_radius(system):
    new = {"adapter.weight": (system.model.adapter.weight.detach() * 1.1).float().numpy()}
    moved = displacement.displacement(Context(system, tokens(n_prompts=1), 200), new, n_more=120)
    rho = np.abs(np.linalg.eigvals(system.model.jacobian(new["adapter.weight"]))).max()
    gap = np.abs(moved.distance[0] - moved.distance[0, -1])
    # Complex eigenvalues make the gap swing: the rate is the slope over many swings.
    slope = np.polyfit(np.arange(5, 60), np.log(gap[5:60]), 1)[0]
    assert np.exp(slope) == pytest.approx(rho, rel=0.03)


@pytest.mark.parametrize(
    ("distances", "tolerance", "settled"),
    [
        ([[2.0, 4.0, 4.0, 4.0, 4.0]], 0.01, 2),
        ([[0.5] * 3] * 2, 0.01, 1),
        ([[0.0, 1.0, 1.0, 1.0]], 0.01, 2),
        ([[5.0, 9.0, 10.0, 10.05, 10.0]], 0.01, 3),
        # The tolerance is a share of the final value, and itself within.
        ([[0.5, 0.96, 1.04, 1.0]], 0.05, 2),
        ([[0.5, 0.96, 1.04, 1.0]], 0.03, None),
        ([[2.0, 3.97, 3.97, 4.0]], 0.01, 2),
        ([[3.0, 4.0]], 0.25, 1),
        ([[1.0, 2.0, 4.0]], 0.01, None),
    ],
)
def test_displacement_settles_within_a_share_of_its_end(distances, tolerance, settled):
    moved = displacement.Displacement(np.array(distances), np.ones((len(distances), len(distances[0]))))
    assert moved.settled_after(tolerance) == settled
    said = moved.to_json()
    assert said["final"] == distances[0][-1]
    if tolerance == 0.01:
        assert said["settled_after"] == settled


def test_what_stands_still_has_not_settled():
    still = displacement.Displacement(np.zeros((1, 3)), np.zeros((1, 3))).to_json()
    assert (still["final"], still["settled_after"]) == (0.0, None)


def test_displacement_is_relative_and_repeats_the_last_step(system, monkeypatch):
    new = {"adapter.weight": (system.model.adapter.weight.detach() * 1.1).float().numpy()}
    seen = []
    plain = type(system).step

    def step(self, state, embedding, t, n_steps):
        seen.append(t)
        return plain(self, state, embedding, t, n_steps)

    # Of the class: other weights run in a copy of the adapter.
    monkeypatch.setattr(type(system), "step", step)
    moved = displacement.displacement(
        Context(system, tokens(n_prompts=3), 4, execution=Execution(batch_size=2)), new
    )
    # Two batches: four steps to the start, four more of both loops.
    assert seen == 2 * ([0, 1, 2, 3] + 8 * [3])
    states = [rollouts.trace(system, b, 8).states for b in tokens(n_prompts=3).batches(1)]
    norms = [[float(s[t].norm()) for t in range(5, 9)] for s in states]
    np.testing.assert_allclose(moved.relative, moved.distance / np.array(norms), rtol=1e-12)
    said = moved.to_json()
    np.testing.assert_allclose(said["relative"], moved.relative.mean(axis=0))
    np.testing.assert_allclose(said["distance"], moved.distance.mean(axis=0))
    assert (said["n_prompts"], said["n_more"], said["final"]) == (
        3,
        4,
        pytest.approx(moved.distance[:, -1].mean()),
    )
    one = displacement.displacement(Context(system, tokens(n_prompts=1), 4), new, n_more=1).to_json()
    assert len(one["distance"]) == 1
    with pytest.raises(ConfigError, match="n_more must be at least 1; got 0"):
        displacement.displacement(Context(system, tokens(), 4), new, n_more=0)


def test_displacement_from_one_step_on_and_of_small_states():
    seen = []
    small = LinearLoop()
    with torch.no_grad():
        small.table.weight *= 1e-6
    system = LinearSystem(small)
    plain = system.step
    system.step = lambda state, embedding, t, n_steps: seen.append(t) or plain(state, embedding, t, n_steps)
    new = {"adapter.weight": (small.adapter.weight.detach() * 1.1).float().numpy()}
    moved = displacement.displacement(Context(system, tokens(n_prompts=1), 1), new, n_more=2)
    assert set(seen) == {0}
    system.step = plain
    far = displacement.displacement(Context(system, tokens(n_prompts=1), 100), new, n_more=2)
    (batch,) = tokens(n_prompts=1).batches(1)
    norm = float(rollouts.trace(system, batch, 101).states[-1].norm())
    assert norm < 1e-3
    assert far.relative[0, 0] == pytest.approx(far.distance[0, 0] / norm)
    assert moved.distance.shape == (1, 2)


def test_contraction_bound_by_its_formula():
    assert displacement.contraction_bound(0.5, 0.75) == 2.0
    assert displacement.contraction_bound(0.5, 0.0) == 0.5
    assert displacement.contraction_bound(0.0, 0.5) == 0.0
    for bad in ((-0.1, 0.5), (1.0, -0.1)):
        with pytest.raises(ConfigError):
            displacement.contraction_bound(*bad)


def test_contraction_bound_holds_on_a_linear_loop():
    system = LinearSystem(LinearLoop(radius=0.3))
    new = {"adapter.weight": (system.model.adapter.weight.detach() * 1.02).float().numpy()}
    data = tokens(n_prompts=1)
    moved = displacement.displacement(Context(system, data, 100), new, n_more=50)
    jq = system.model.jacobian(new["adapter.weight"])
    modulus = np.linalg.norm(jq, 2)
    assert modulus < 1
    (batch,) = data.batches(1)
    star = rollouts.trace(system, batch, 100, read=()).states[-1]
    with under(system, new) as other:
        defect = float((other.step(star, other.embed(batch), 0, 1) - star).detach().norm())
    bound = displacement.contraction_bound(defect, modulus)
    assert moved.distance.max() <= bound * (1 + 1e-9)
    with pytest.raises(ConfigError, match="L < 1"):
        displacement.contraction_bound(1.0, 1.0)


def test_a_system_without_steps_cannot_be_continued():
    with pytest.raises(ConfigError, match="blind-toy"):
        displacement.displacement(Context(BlindSystem(LinearLoop()), tokens(), 8), {})


def test_one_step_predicts_the_displacement_of_a_linear_loop():
    system = LinearSystem(LinearLoop(radius=0.3))
    new = {"adapter.weight": (system.model.adapter.weight.detach() * 1.02).float().numpy()}
    data = tokens(n_prompts=2)
    prediction = displacement.predicted(Context(system, data, 60), new)
    jq = system.model.jacobian(new["adapter.weight"])
    for row in prediction:
        # The loop is linear, so the prediction is exact, and the bound is one.
        assert row["linear"] == pytest.approx(row["measured"], rel=1e-4)
        assert row["modulus"] == pytest.approx(np.linalg.norm(jq, 2), rel=1e-2)
        assert row["measured"] <= row["bound"] * (1 + 1e-6)
        assert row["bound"] == pytest.approx(row["defect"] / (1 - row["modulus"]))
