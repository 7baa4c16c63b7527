"""Injections, interventions and displacements on a linear loop, against closed forms."""

import numpy as np
import pytest
import torch

from loopq.analysis.diagnosis import exposure, rollouts
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.sections import feedback
from loopq.errors import ConfigError
from loopq.settings.execution import Execution
from tests.support.looperrors import INT4, state_dict
from tests.support.looptoys import BlindSystem, LinearLoop, LinearSystem, numpy_rounder, tokens, under


def test_unpaired_states_disagree_at_first_and_forget(system):
    # A contraction forgets its initial state: agreement of two unchanged runs rises to 1.
    data = tokens(n_prompts=6, n_tokens=40)
    curve = rollouts.run_variants(Context(system, data, 60), {"same": {}}, variant_seed=9)["same"].curve(
        "agreement"
    )
    assert curve[0] < 0.95
    assert curve[-1] == 1.0


def test_injected_sets_are_a_partition_and_noise_has_its_norm(system):
    variants = exposure.injection_weights(system, 8, INT4, rounder=numpy_rounder)
    assert set(variants["exposed"]) | set(variants["core"]) == set(variants["all"])
    assert not set(variants["exposed"]) & set(variants["core"])
    for name, value in variants["exposed"].items():
        np.testing.assert_array_equal(value, variants["all"][name])
    weight = system.model.adapter.weight.detach().numpy()
    norms = [np.linalg.norm(variants[v]["adapter.weight"] - weight) for v in ("exposed", "gaussian")]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


def test_controlled_injection_says_paired_and_unpaired(system):
    before = state_dict(system)
    study = exposure.controlled_injection(Context(system, tokens(), 8, rounder=numpy_rounder), INT4)
    assert set(study["paired"]) == {"none", "exposed", "core", "all", "gaussian"}
    assert study["paired"]["none"]["agreement"] == [1.0] * 8
    assert study["unpaired"]["none"]["agreement"][0] < 1.0
    assert study["paired"]["exposed"]["state_error"][-1] > 0
    assert study["paired"]["all"]["final_agreement"]["n"] == 3
    assert all((before[k] == v).all() for k, v in system.model.state_dict().items())


def test_recovered_is_the_agreement_share_of_kept_exposed_layers(system):
    data = tokens(n_prompts=6, n_tokens=40)
    study = exposure.controlled_injection(Context(system, data, 8, rounder=numpy_rounder), INT4)
    variants = exposure.injection_weights(system, 8, INT4, rounder=numpy_rounder)
    agreement = {}
    for name in ("all", "core"):
        same = []
        for batch in data.batches(8):
            whole = system.rollout(batch, 8).argmax(-1)
            with under(system, variants[name], 8) as other:
                same.append((other.rollout(batch, 8).argmax(-1) == whole).double())
        agreement[name] = float(torch.cat(same).mean())
    assert agreement["all"] < agreement["core"] < 1
    expected = (agreement["core"] - agreement["all"]) / (1 - agreement["all"])
    assert study["recovered"] == pytest.approx(expected)
    same = exposure.controlled_injection(Context(system, data, 8, rounder=lambda w, c: w), INT4)
    assert same["recovered"] is None


def test_systems_without_exposed_layers_or_steps_get_a_part(system):
    blind = BlindSystem(LinearLoop())
    study = exposure.controlled_injection(Context(blind, tokens(), 8, rounder=numpy_rounder), INT4)
    assert set(study["paired"]) == {"none", "all"}
    assert study["unpaired"] is None
    assert study["recovered"] is None
    assert study["paired"]["all"]["state_error"] is None
    assert study["paired"]["all"]["steps"] == [8]
    for call in (
        lambda: feedback.feedback_curve(Context(blind, tokens(), 8), {}),
        lambda: exposure.adapter_output_ratio(blind, tokens(), 8),
    ):
        with pytest.raises(ConfigError, match="blind-toy"):
            call()


def test_finer_groups_err_less(system):
    rows = exposure.group_size_sweep(Context(system, tokens(), 8, rounder=numpy_rounder), INT4, (3, -1))
    assert [r["group_size"] for r in rows] == [3, -1]
    assert rows[0]["state_error"][-1] < rows[1]["state_error"][-1]


def test_adapter_output_ratio_of_a_known_map():
    model = LinearLoop()
    with torch.no_grad():
        model.adapter.weight[:] = torch.cat([0.5 * torch.eye(6), torch.zeros(6, 6)], 1)
        model.core.weight.zero_()
    (ratio,) = exposure.adapter_output_ratio(LinearSystem(model), tokens(), 4).values()
    assert ratio["per_step"] == pytest.approx([0.5] * 4)
    assert ratio["std"] == pytest.approx(0.0, abs=1e-12)


def test_adapter_output_ratio_leaves_out_the_noise_state():
    model = LinearLoop()
    with torch.no_grad():
        model.adapter.weight[:] = torch.cat([torch.zeros(6, 6), torch.eye(6)], 1)
        model.core.weight.zero_()
    system, data = LinearSystem(model), tokens()
    (ratio,) = exposure.adapter_output_ratio(system, data, 4, batch_size=2).values()
    (batch,) = data.batches(8)
    states = rollouts.trace(system, batch, 1).states
    noise, embedding = (s.flatten(1).norm(dim=1).numpy() for s in states)
    assert ratio["per_step"] == pytest.approx([(embedding / noise).mean(), 1, 1, 1])
    assert (ratio["mean"], ratio["std"]) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-12))
    (one,) = exposure.adapter_output_ratio(system, data, 1).values()
    assert one["mean"] == one["per_step"][0] == ratio["per_step"][0]
    assert one["std"] == pytest.approx((embedding / noise).std())


def test_adapter_output_ratio_of_two_updates_is_the_seconds():
    system, data = LinearSystem(LinearLoop()), tokens()
    for updates in (2, 3):
        (ratio,) = exposure.adapter_output_ratio(system, data, updates).values()
        assert ratio["mean"] == pytest.approx(np.mean(ratio["per_step"][1:]))
        assert len(set(ratio["per_step"])) == updates
    assert not any(module._forward_hooks for module in system.model.modules())


def test_adapter_output_ratio_needs_an_update(system):
    system.n_updates = lambda n_steps: 0
    with pytest.raises(ConfigError, match="no state is updated"):
        exposure.adapter_output_ratio(system, tokens(), 1)


def test_groups_are_compared_as_variants_are(system):
    """Rounding the whole loop, compared at every step."""
    whole = exposure.injection_weights(system, 8, INT4, rounder=numpy_rounder)["all"]
    data = tokens(n_prompts=4, n_tokens=12)
    run = rollouts.run_variants(Context(system, data, 8, execution=Execution(seed=3)), {"a": whole})["a"]
    (row,) = exposure.group_size_sweep(
        Context(system, data, 8, rounder=numpy_rounder, execution=Execution(seed=3)), INT4, (-1,)
    )
    assert row["state_error"] == run.curve("state_error").tolist()
    study = exposure.controlled_injection(
        Context(system, data, 8, rounder=numpy_rounder, execution=Execution(seed=3)), INT4
    )
    assert study["paired"]["all"]["kl"] == run.curve("kl").tolist()
    last = run.agreement[:, -1]
    assert study["paired"]["all"]["final_agreement"]["estimate"] == pytest.approx(last.mean())
    assert study["settings"] == {"bits": 4, "group_size": -1, "seed": 3}
    again = exposure.injection_weights(system, 8, INT4, rounder=numpy_rounder, noise_seed=3)["gaussian"]
    noise = rollouts.run_variants(Context(system, data, 8, execution=Execution(seed=3)), {"a": again})["a"]
    assert study["paired"]["gaussian"]["kl"] == noise.curve("kl").tolist()
