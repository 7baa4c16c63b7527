"""The step of the model that ships with the package: its spectral radius and its Jacobian."""

import pytest
import torch

from loopq import zoo
from loopq.analysis.diagnosis import weights
from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.survey import diagnose
from loopq.calibrate.data import windows
from loopq.models.load import load_model
from loopq.paper.diagnosis import spectral
from loopq.paper.diagnosis.stepmap import StepMap, final_state
from loopq.paper.plbert import load_plbert, phonemes
from loopq.quantizers.config import LayerConfig
from loopq.settings.execution import Execution

PER_CHANNEL = LayerConfig.of(method="rtn", scale_search="max", bits=4, group_size=-1)


@pytest.fixture(scope="module")
def loaded():
    return load_model("huginn_small")


@pytest.fixture(scope="module")
def system(loaded):
    return loaded.system


@pytest.fixture(scope="module")
def prompts(loaded):
    return windows(zoo.evaluation_text().decode(), loaded.encode, 48, 8, "embedded evaluation text")


@pytest.mark.slow
def test_spectral_radius_meets_the_rules_on_every_prompt(system, prompts):
    new = weights.rounded(system, [system.shared_parameters(8)[0]], PER_CHANNEL)
    study = spectral.radius_study(Context(system, prompts.take(0, 2), 8), new, with_bypass=False)
    acceptance = study["acceptance"]
    print(
        f"largest relative Ritz residual {acceptance['largest_residual']:.2e} in {acceptance['n_estimates']} estimates"
    )
    assert acceptance["n_accepted"] == acceptance["n_maps"] == 4
    assert acceptance["largest_residual"] < 1e-3
    assert acceptance["largest_disagreement"] < 2e-3
    maps = study["states"]["plain"]["maps"]
    assert maps["reference"]["norm"]["estimate"] > maps["reference"]["radius"]["estimate"] > 0


def test_jacobian_products_agree_with_finite_differences(system, prompts):
    (batch,) = prompts.take(0, 1).batches(1)
    embedding, state = final_state(system, batch, 8)
    step = StepMap(system, embedding, 7, 8)
    v = torch.randn(state.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        finite = (step(state + 1e-2 * v) - step(state - 1e-2 * v)) / 2e-2
    exact = step.product(state, v)
    assert float((exact - finite).norm() / exact.norm()) < 1e-2


@pytest.mark.slow
@pytest.mark.data
def test_plbert_has_a_radius_and_no_exposed_layer(data_folder):
    system, prompts = load_plbert(data_folder).system, phonemes(data_folder, "evaluation", 24, 2)
    config = DiagnoseConfig(n_prompts=2, n_jacobian_prompts=1, seeds=(0,))
    only = ["perturbation", "jacobian", "bypass"]
    diagnosis = diagnose(
        Context(system, prompts, system.n_steps, config, execution=Execution(batch_size=2)), only=only
    )
    assert {u["section"] for u in diagnosis["unavailable"]} >= {"perturbation", "bypass"}
    acceptance = diagnosis["sections"]["jacobian"]["acceptance"]
    assert acceptance["n_accepted"] == acceptance["n_maps"] == 2
