"""The diagnoses on the model that ships with the package: findings of Li, Sec. 3 and 4, as far as they show here."""

import numpy as np
import pytest
import torch

from loopq import zoo
from loopq.analysis.diagnosis import exposure, rollouts, survey, weights
from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.sections import ablation as sensitivity
from loopq.analysis.diagnosis.sections import feedback
from loopq.calibrate.data import windows
from loopq.models.load import load_model
from loopq.quantizers.config import LayerConfig
from tests.support.looptoys import under

PER_CHANNEL = LayerConfig.of(method="rtn", scale_search="max", bits=4, group_size=-1)
ADAPTER = "transformer.adapter.weight"


@pytest.fixture(scope="module")
def loaded():
    return load_model("huginn_small")


@pytest.fixture(scope="module")
def system(loaded):
    return loaded.system


@pytest.fixture(scope="module")
def prompts(loaded):
    return windows(zoo.evaluation_text().decode(), loaded.encode, 48, 8, "embedded evaluation text")


def test_full_feedback_is_the_natural_rollout_bit_for_bit(system, prompts):
    changed = feedback.split_weights(system, 8, PER_CHANNEL)["all columns"]
    (batch,) = prompts.batches(8)
    reference = rollouts.trace(system, batch, 8)
    natural = rollouts.run_under(system, batch, 8, changed, None).states[-1]
    with under(system, changed) as other:
        assert torch.equal(feedback.intervened(other, batch, 8, reference, 1.0), natural)
    with torch.no_grad():
        torch.testing.assert_close(reference.outputs[8], system.rollout(batch, 8))


def test_injections_with_paired_and_unpaired_states(system, prompts):
    study = exposure.controlled_injection(Context(system, prompts, 8), PER_CHANNEL)
    paired, unpaired = study["paired"], study["unpaired"]
    assert paired["none"]["agreement"] == [1.0] * 8
    # As the two bf16 runs of Li, Table 3: many tokens differ at first, nearly none at the end.
    assert unpaired["none"]["agreement"][0] < 0.8
    assert unpaired["none"]["agreement"][-1] > 0.97
    assert 0 < paired["exposed"]["state_error"][-1] < paired["all"]["state_error"][-1]


def test_adapter_costs_most_with_one_scale_per_row(system, prompts):
    ablations = sensitivity.ablation(Context(system, prompts, 8), PER_CHANNEL)
    assert max(ablations, key=lambda name: ablations[name]["changed"]) == ADAPTER
    assert max(ablations, key=lambda name: ablations[name]["kl_last"]) == ADAPTER
    # And no one-step measure says so.
    w = {p.name: weights.weight_of(system, p) for p in system.shared_parameters(8)}
    gain = sensitivity.gains(system, prompts.take(0, 2), 4, weights=w, n_draws=2)
    assert sensitivity.places(gain)[ADAPTER] > 3


def test_feedback_adds_to_the_error(system, prompts):
    changed = feedback.split_weights(system, 8, PER_CHANNEL)["all columns"]
    curve = feedback.feedback_curve(
        Context(system, prompts, 8), changed, lambdas=(0, 0.5, 1), seeds=(0, 1)
    ).to_json()
    assert curve["ratio"]["low"] > 1.0
    assert curve["error"][2] > curve["error"][1]


def test_first_state_is_noise_and_the_last_is_not(system, prompts):
    config = DiagnoseConfig(n_prompts=2)
    diagnosis = survey.diagnose(Context(system, prompts, system.n_steps, config), only=["overlap", "ranks"])
    by = {(r["between"], r["k"]): r for r in diagnosis["sections"]["overlap"]["overlaps"]}
    first, last = by["steps 0 and 7, seed 0", 32], by["seeds 0 and 1, step 7", 32]
    assert first["overlap"] == pytest.approx(first["chance"], rel=0.2)
    assert last["overlap"] > 0.95
    adapter = diagnosis["layers"][0]
    assert adapter["name"] == ADAPTER
    assert "state half is noise" in adapter["verdict"]["text"]
    blocks = diagnosis["sections"]["ranks"]["layers"][ADAPTER]["blocks"]
    # Noise fills the state half at step 0; later steps live in fewer directions.
    assert blocks["state"]["first"]["rank"] == 128 > blocks["state"]["last"]["rank"]
    ranks = [s["rank"] for s in blocks["embedding"]["per_step"]]
    assert len(set(ranks)) == 1, "the embedding half is the same at every step"
    assert np.isfinite(diagnosis["sections"]["ranks"]["layers"][ADAPTER]["rank_gain"])
