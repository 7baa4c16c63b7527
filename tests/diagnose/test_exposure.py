"""Injections, interventions and displacements on a linear loop, against closed forms."""

import dataclasses

import numpy as np
import pytest
import torch

from loopq.calibrate.data import from_ids
from loopq.diagnose import exposure, feedback, rollouts, weights
from loopq.diagnose.context import Context
from loopq.errors import ConfigError, NonFiniteError
from loopq.quantizers.config import LayerConfig
from loopq.settings.execution import Execution
from loopq.terminal.progress import Silent
from tests.support.looptoys import BlindSystem, LinearLoop, LinearSystem, numpy_rounder, tokens, under

INT4 = LayerConfig.of(bits=4, group_size=-1)


@pytest.fixture
def system():
    return LinearSystem(LinearLoop())


def state_dict(system):
    return {k: v.clone() for k, v in system.model.state_dict().items()}


def test_weights_come_back_bit_for_bit_also_after_an_error(system):
    before = state_dict(system)
    new = {"adapter.weight": np.zeros((6, 12), np.float32)}

    def fail():
        with under(system, new):
            assert (system.model.adapter.weight == 0).all()
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert all((before[k] == v).all() for k, v in system.model.state_dict().items())


def test_bad_weights_are_refused_before_anything_is_changed(system):
    before = state_dict(system)
    good = np.zeros((6, 12), np.float32)
    bad = np.zeros((6, 6), np.float32)
    bad[2, 3] = np.nan
    for new, error, text in [
        ({"adapter.weight": good, "head.weight": good}, ConfigError, "head.weight is not a shared parameter"),
        ({"adapter.weight": good, "core.weight": good}, ConfigError, r"shape \(6, 6\) is needed"),
        ({"adapter.weight": good, "core.weight": bad}, NonFiniteError, r"weight\[2, 3\]"),
    ]:
        with pytest.raises(error, match=text), under(system, new):
            pass
    assert all((before[k] == v).all() for k, v in system.model.state_dict().items())


def test_transposed_storage_is_written_transposed():
    class Conv1D(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.arange(18.0).reshape(6, 3))

    class Transposed(LinearSystem):
        def shared_parameters(self, n_steps):
            from loopq.systems.base import declare

            return declare(self.model, [("conv", {"role": "mlp"})], n_steps)

    model = torch.nn.Module()
    model.conv = Conv1D()
    system = Transposed(model)
    (p,) = system.shared_parameters(1)
    assert (p.out_features, p.in_features) == (3, 6)
    np.testing.assert_array_equal(weights.weight_of(system, p), model.conv.weight.detach().numpy().T)
    new = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    with under(system, {"conv.weight": new}, 1):
        np.testing.assert_array_equal(model.conv.weight.detach().numpy(), new.T)
        np.testing.assert_array_equal(weights.weight_of(system, p), new)


def test_a_model_agrees_with_itself_and_kl_is_zero(system):
    found = rollouts.run_variants(Context(system, tokens(), 8), {"same": {}})["same"]
    assert (found.agreement == 1).all()
    assert (found.kl == 0).all()
    assert (found.state_error == 0).all()
    assert found.steps == tuple(range(1, 9))


def test_the_question_of_a_task_is_not_compared(system):
    new = exposure.injection_weights(system, 8, INT4, rounder=numpy_rounder)["all"]
    data = dataclasses.replace(tokens(n_tokens=6), scored_from=4)
    found = rollouts.run_variants(Context(system, data, 8), {"a": new})["a"]
    (batch,) = data.batches(8)
    whole = system.rollout(batch, 8)[:, 4:].float()
    with under(system, new, 8):
        out = system.rollout(batch, 8)[:, 4:].float()
    assert found.positions.tolist() == [2, 2, 2]
    np.testing.assert_allclose(found.kl[:, -1], rollouts.kl_divergence(out, whole), rtol=1e-12)
    np.testing.assert_array_equal(found.matches[:, -1], (out.argmax(-1) == whole.argmax(-1)).sum(1))


def test_kl_is_positive_unless_equal():
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 3, 7, generator=rng), torch.randn(2, 3, 7, generator=rng)
    assert (rollouts.kl_divergence(a, b) > 0).all()
    assert (rollouts.kl_divergence(a, a + 5.0) < 1e-12).all()
    p, q = torch.softmax(b.double(), -1), torch.softmax(a.double(), -1)
    torch.testing.assert_close(
        torch.from_numpy(rollouts.kl_divergence(a, b)), (p * (p / q).log()).sum(-1).mean(1)
    )


def test_kl_of_equal_distributions_is_never_negative():
    """Where logits differ in their last digits, rounding leaves sums on both sides of zero."""
    drawn = torch.randn(2, 2000, 1, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits, near = drawn[0], drawn[0] + 1e-12 * drawn[1]
    p, q = logits.log_softmax(-1), near.log_softmax(-1)
    assert ((p.exp() * (p - q)).sum(-1) < 0).any()
    assert (rollouts.kl_divergence(near, logits) >= 0).all()


def test_errors_are_relative_whatever_the_size_of_the_reference():
    value = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
    reference = torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    for size in (1e-3, 1.0, 1e3):
        np.testing.assert_allclose(
            rollouts.relative_error(size * value, size * reference), [0.5, 1.0, 0.0], rtol=1e-6
        )


def test_outputs_that_overflow_are_refused_with_the_step(system):
    reference = rollouts.Trace([], {1: torch.zeros(1, 2, 3), 2: torch.zeros(1, 2, 3)})
    for bad in (float("nan"), float("inf")):
        run = rollouts.Trace([], {1: torch.zeros(1, 2, 3), 2: torch.full((1, 2, 3), bad)})
        with pytest.raises(NonFiniteError, match="after 2 steps"):
            rollouts.compare_traces(run, reference, logits=True)


def test_hidden_states_are_compared_from_the_first_position_on():
    """Only logits have a question before the answer."""
    one, other = torch.ones(1, 3, 2), torch.ones(1, 3, 2)
    other[0, 0] = 5.0
    found = rollouts.compare_traces(
        rollouts.Trace([], {1: other}), rollouts.Trace([], {1: one}), logits=False, scored_from=2
    )
    assert found.positions.tolist() == [3]
    np.testing.assert_allclose(found.output_error, [[np.sqrt(32 / 6)]], rtol=1e-6)
    assert (found.matches, found.kl) == (None, None)


def test_states_are_compared_after_every_update_if_there_is_one(system):
    new = exposure.injection_weights(system, 8, INT4, rounder=numpy_rounder)["all"]
    found = rollouts.run_variants(Context(system, tokens(), 1), {"a": new})["a"]
    assert found.state_error.shape == (3, 1)
    assert (found.state_error > 0).all()
    alone = rollouts.Trace([torch.ones(1, 3, 2)], {0: torch.ones(1, 3, 2)})
    assert rollouts.compare_traces(alone, alone, logits=False).state_error is None


def test_progress_is_told_as_many_rollouts_as_there_are(system):
    class Counted(Silent):
        total = done = 0

        def start(self, stage, total, unit):
            self.total += total

        def advance(self, n=1):
            self.done += n

    told = Counted()
    rollouts.run_variants(
        Context(system, tokens(), 2, execution=Execution(batch_size=1, progress=told)),
        {"a": {}, "b": {}, "c": {}},
    )
    assert told.done == told.total == 3 * 4


def test_unpaired_states_disagree_at_first_and_forget(system):
    # A contraction forgets its initial state: agreement of two unchanged runs rises to 1.
    data = tokens(n_prompts=6, n_tokens=40)
    found = rollouts.run_variants(Context(system, data, 60), {"same": {}}, variant_seed=9)["same"].curve(
        "agreement"
    )
    assert found[0] < 0.95
    assert found[-1] == 1.0


def test_injected_sets_partition_the_layers_and_the_noise_has_its_norm(system):
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
    found = exposure.controlled_injection(Context(system, tokens(), 8, rounder=numpy_rounder), INT4)
    assert set(found["paired"]) == {"none", "exposed", "core", "all", "gaussian"}
    assert found["paired"]["none"]["agreement"] == [1.0] * 8
    assert found["unpaired"]["none"]["agreement"][0] < 1.0
    assert found["paired"]["exposed"]["state_error"][-1] > 0
    assert found["paired"]["all"]["final_agreement"]["n"] == 3
    assert all((before[k] == v).all() for k, v in system.model.state_dict().items())


def test_recovered_is_the_share_of_the_lost_agreement_that_kept_exposed_layers_bring_back(system):
    data = tokens(n_prompts=6, n_tokens=40)
    found = exposure.controlled_injection(Context(system, data, 8, rounder=numpy_rounder), INT4)
    variants = exposure.injection_weights(system, 8, INT4, rounder=numpy_rounder)
    agreement = {}
    for name in ("all", "core"):
        same = []
        for batch in data.batches(8):
            whole = system.rollout(batch, 8).argmax(-1)
            with under(system, variants[name], 8):
                same.append((system.rollout(batch, 8).argmax(-1) == whole).double())
        agreement[name] = float(torch.cat(same).mean())
    assert agreement["all"] < agreement["core"] < 1
    expected = (agreement["core"] - agreement["all"]) / (1 - agreement["all"])
    assert found["recovered"] == pytest.approx(expected)
    same = exposure.controlled_injection(Context(system, data, 8, rounder=lambda w, c: w), INT4)
    assert same["recovered"] is None


def test_systems_without_exposed_layers_or_steps_get_what_they_can(system):
    blind = BlindSystem(LinearLoop())
    found = exposure.controlled_injection(Context(blind, tokens(), 8, rounder=numpy_rounder), INT4)
    assert set(found["paired"]) == {"none", "all"}
    assert found["unpaired"] is None
    assert found["recovered"] is None
    assert found["paired"]["all"]["state_error"] is None
    assert found["paired"]["all"]["steps"] == [8]
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
    (found,) = exposure.adapter_output_ratio(LinearSystem(model), tokens(), 4).values()
    assert found["per_step"] == pytest.approx([0.5] * 4)
    assert found["std"] == pytest.approx(0.0, abs=1e-12)


def test_adapter_output_ratio_leaves_out_the_first_state_which_is_noise():
    model = LinearLoop()
    with torch.no_grad():
        model.adapter.weight[:] = torch.cat([torch.zeros(6, 6), torch.eye(6)], 1)
        model.core.weight.zero_()
    system, data = LinearSystem(model), tokens()
    (found,) = exposure.adapter_output_ratio(system, data, 4, batch_size=2).values()
    (batch,) = data.batches(8)
    states = rollouts.trace(system, batch, 1).states
    noise, embedding = (s.flatten(1).norm(dim=1).numpy() for s in states)
    assert found["per_step"] == pytest.approx([(embedding / noise).mean(), 1, 1, 1])
    assert (found["mean"], found["std"]) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-12))
    (one,) = exposure.adapter_output_ratio(system, data, 1).values()
    assert one["mean"] == one["per_step"][0] == found["per_step"][0]
    assert one["std"] == pytest.approx((embedding / noise).std())


def test_adapter_output_ratio_of_two_updates_is_that_of_the_second():
    system, data = LinearSystem(LinearLoop()), tokens()
    for updates in (2, 3):
        (found,) = exposure.adapter_output_ratio(system, data, updates).values()
        assert found["mean"] == pytest.approx(np.mean(found["per_step"][1:]))
        assert len(set(found["per_step"])) == updates
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
    found = exposure.controlled_injection(
        Context(system, data, 8, rounder=numpy_rounder, execution=Execution(seed=3)), INT4
    )
    assert found["paired"]["all"]["kl"] == run.curve("kl").tolist()
    last = run.agreement[:, -1]
    assert found["paired"]["all"]["final_agreement"]["estimate"] == pytest.approx(last.mean())
    assert found["settings"] == {"bits": 4, "group_size": -1, "seed": 3}
    again = exposure.injection_weights(system, 8, INT4, rounder=numpy_rounder, noise_seed=3)["gaussian"]
    noise = rollouts.run_variants(Context(system, data, 8, execution=Execution(seed=3)), {"a": again})["a"]
    assert found["paired"]["gaussian"]["kl"] == noise.curve("kl").tolist()


def test_comparisons_are_made_position_by_position_and_pooled(system):
    new = exposure.injection_weights(system, 8, INT4, rounder=numpy_rounder)["all"]
    ids = [s.tolist() for s in tokens(n_prompts=3, n_tokens=12).sequences]
    data = from_ids([ids[0], ids[1][:3], ids[2]])
    found = rollouts.run_variants(
        Context(system, data, 8, execution=Execution(batch_size=2)), {"a": new}, read=(8, 2)
    )["a"]
    assert found.steps == (2, 8)
    assert found.positions.tolist() == [12, 3, 12]
    for number, batch in enumerate(data.batches(1)):
        reference = rollouts.trace(system, batch, 8)
        other = rollouts.run_under(system, batch, 8, new, None)
        for column, step in enumerate((2, 8)):
            a, b = reference.outputs[step][0], other.outputs[step][0]
            assert found.matches[number, column] == int((a.argmax(-1) == b.argmax(-1)).sum())
            assert found.output_error[number, column] == pytest.approx(
                float((b - a).norm() / a.norm()), rel=1e-5
            )
        apart = [
            float((b - a).norm() / a.norm()) for a, b in zip(reference.states, other.states, strict=True)
        ]
        assert found.state_error[number] == pytest.approx(apart[1:])
    np.testing.assert_allclose(found.agreement, found.matches / [[12], [3], [12]])
    np.testing.assert_allclose(found.pooled_agreement(), found.matches.sum(0) / 27)
    said = found.to_json()
    assert (said["n_prompts"], said["n_positions"], said["steps"]) == (3, 27, [2, 8])
    np.testing.assert_allclose(said["agreement"], found.agreement.mean(0))
    np.testing.assert_allclose(said["agreement_pooled"], found.pooled_agreement())
    np.testing.assert_allclose(said["kl"], found.kl.mean(0))
    np.testing.assert_allclose(said["state_error"], found.state_error.mean(0))
    np.testing.assert_allclose(said["output_error"], found.output_error.mean(0))


def test_full_feedback_is_the_natural_rollout_bit_for_bit(system):
    changed = feedback.split_weights(system, 8, INT4, numpy_rounder)["all columns"]
    (batch,) = tokens().batches(8)
    reference = rollouts.trace(system, batch, 8)
    natural = rollouts.run_under(system, batch, 8, changed, None).states[-1]
    with under(system, changed):
        assert torch.equal(feedback.intervened(system, batch, 8, reference, 1.0), natural)


def test_no_feedback_is_the_error_of_one_step(system):
    changed = feedback.split_weights(system, 8, INT4, numpy_rounder)["all columns"]
    (batch,) = tokens().batches(8)
    reference = rollouts.trace(system, batch, 8)
    with under(system, changed):
        found = feedback.intervened(system, batch, 8, reference, 0.0)
        single = system.step(reference.states[7], system.embed(batch), 7, 8)
    assert torch.equal(found, single)


@pytest.mark.parametrize("strength", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_feedback_follows_the_closed_form(system, strength):
    # e_{t+1} = D(s_t) + lambda J^ e_t with D the map's error: e_N = sum_j (lambda J^)^j D(s_{N-1-j}).
    changed = feedback.split_weights(system, 8, INT4, numpy_rounder)["all columns"]
    new = changed["adapter.weight"].astype(np.float64)
    (batch,) = tokens(n_prompts=1).batches(8)
    reference = rollouts.trace(system, batch, 8)
    states = [s[0].numpy() for s in reference.states]
    ids = batch.input_ids[0]
    j = system.model.jacobian(new)
    defects = [
        states[t] @ (j - system.model.jacobian()).T + system.model.drive(ids, new) - system.model.drive(ids)
        for t in range(8)
    ]
    expected = sum(defects[7 - k] @ np.linalg.matrix_power(strength * j, k).T for k in range(8))
    with under(system, changed):
        found = feedback.intervened(system, batch, 8, reference, strength)[0].numpy()
    np.testing.assert_allclose(found - states[8], expected, atol=1e-12)


def test_error_rises_with_feedback_where_errors_add_up():
    # A positive map and a positive defect: nothing cancels, so every prompt's curve rises.
    model = LinearLoop(core=0.0)
    with torch.no_grad():
        model.adapter.weight.abs_()
        model.table.weight.abs_()
        model.adapter.weight[:, :6] *= 0.6 / np.abs(np.linalg.eigvals(model.jacobian())).max()
    system = LinearSystem(model)
    system.initial_state = lambda batch, e: torch.ones_like(e)
    new = {"adapter.weight": (model.adapter.weight.detach() * 1.05).float().numpy()}
    curve = feedback.feedback_curve(Context(system, tokens(), 8), new, seeds=(0, 1))
    found = curve.to_json()
    assert found["mean_is_monotone"]
    assert found["monotone_prompts"] == found["n_prompts"] == 3
    assert found["ratio"]["low"] > 1.5
    assert found["n_seeds"] == 2
    assert (np.diff(curve.error, axis=0) > 0).all()


@pytest.mark.parametrize("first", [0, 2])
def test_a_curve_is_the_mean_over_initial_states_of_each_prompts_error(system, first):
    changed = feedback.split_weights(system, 8, INT4, numpy_rounder)["all columns"]
    data = dataclasses.replace(tokens(n_prompts=3), scored_from=first)
    strengths = (0.5, 0.0, 1.0)
    curve = feedback.feedback_curve(
        Context(system, data, 8, execution=Execution(batch_size=2)), changed, lambdas=strengths, seeds=(0, 1)
    )
    assert curve.lambdas == (0.0, 0.5, 1.0)
    errors, agreements = np.zeros((2, 3)), np.zeros((2, 3))
    for seed in (0, 1):
        (batch,) = data.batches(8, seed)
        reference = rollouts.trace(system, batch, 8)
        for row, strength in enumerate((0.5, 1.0)):
            with under(system, changed):
                state = feedback.intervened(system, batch, 8, reference, strength)
            apart = (state - reference.states[-1]).flatten(1).norm(dim=1) / reference.states[-1].flatten(
                1
            ).norm(dim=1)
            errors[row] += apart.numpy() / 2
            same = system.predict(state, None).argmax(-1) == reference.outputs[8].argmax(-1)
            agreements[row] += same[:, first:].double().mean(1).detach().numpy() / 2
    np.testing.assert_allclose(curve.error[1:], errors, rtol=1e-9)
    np.testing.assert_allclose(curve.agreement[1:], agreements)
    assert curve.agreement.min() < 1
    assert curve.to_json()["agreement"] == pytest.approx(curve.agreement.mean(axis=1).tolist())


def test_a_curve_says_where_it_falls():
    def said(*error):
        return feedback.FeedbackCurve((0.0, 0.5, 1.0), np.array(error), None, 1).to_json()

    rising = said([1.0, 2.0], [1.0, 3.0], [4.0, 4.0])
    assert (rising["mean_is_monotone"], rising["monotone_prompts"], rising["agreement"]) == (True, 2, None)
    assert rising["ratio"]["estimate"] == pytest.approx(np.sqrt(4.0 * 2.0))
    assert rising["error"] == [1.5, 2.0, 4.0]
    falling = said([1.0, 2.0], [0.9, 2.2], [0.8, 1.0])
    assert (falling["mean_is_monotone"], falling["monotone_prompts"]) == (False, 0)
    assert falling["ratio"]["estimate"] == pytest.approx(np.sqrt(0.4))
    mixed = said([1.0, 2.0], [0.5, 2.5], [1.0, 3.0])
    assert (mixed["mean_is_monotone"], mixed["monotone_prompts"]) == (True, 1)
    assert said([1e-6, 2e-6], [0.999e-6, 3e-6], [2e-6, 4e-6])["monotone_prompts"] == 1
    # Within rounding nothing falls.
    assert said([1.0, 1.0], [1.0, 1.0 - 1e-10], [1.0, 1.0])["monotone_prompts"] == 2
    assert said([0.0, 1.0], [1.0, 1.0], [1.0, 1.0])["ratio"] is None
    assert said([1.0, 1.0], [1.0, 1.0], [0.0, 1.0])["ratio"] is None


def test_split_columns_partition_the_error(system):
    variants = feedback.split_weights(system, 8, INT4, numpy_rounder)
    assert set(variants) == {"all columns", "state columns", "embedding columns"}
    weight = weights.weight_of(system, system.shared_parameters(8)[0])
    parts = [variants[f"{b} columns"]["adapter.weight"] - weight for b in ("state", "embedding")]
    np.testing.assert_array_equal(parts[0][:, 6:], 0)
    np.testing.assert_array_equal(parts[1][:, :6], 0)
    np.testing.assert_allclose(sum(parts), variants["all columns"]["adapter.weight"] - weight, atol=1e-7)


def test_feedback_study_is_plain_data(system):
    found = feedback.feedback_study(
        Context(system, tokens(), 8, rounder=numpy_rounder), {"per channel": INT4}, lambdas=(0, 1), seeds=(0,)
    )
    assert set(found["per channel"]) == {"all columns", "state columns", "embedding columns"}
    assert found["per channel"]["all columns"]["lambdas"] == [0, 1]
    with pytest.raises(ConfigError, match="between 0 and 1"):
        feedback.feedback_curve(Context(system, tokens(), 8), {}, lambdas=(0, 0.5, 1.5))
    for bad in ((), (-0.5, 1)):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            feedback.feedback_curve(Context(system, tokens(), 8), {}, lambdas=bad)


def test_a_fixed_initial_state_needs_one_seed(system):
    def n_seeds():
        settings = {"per channel": INT4}
        found = feedback.feedback_study(
            Context(system, tokens(), 2, rounder=numpy_rounder), settings, lambdas=(1,), seeds=(0, 1)
        )
        return found["per channel"]["all columns"]["n_seeds"]

    assert n_seeds() == 2
    system.state_is_random = False
    assert n_seeds() == 1


def test_feedback_without_exposed_layers_rounds_all():
    class Covered(LinearSystem):
        name = "covered-toy"

        def shared_parameters(self, n_steps):
            return BlindSystem(self.model).shared_parameters(n_steps)

    variants = feedback.split_weights(Covered(LinearLoop()), 8, INT4, numpy_rounder)
    assert {name: sorted(w) for name, w in variants.items()} == {
        "all columns": ["adapter.weight", "core.weight"]
    }
