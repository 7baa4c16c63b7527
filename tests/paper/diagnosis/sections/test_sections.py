"""The paper's sections in a diagnosis: they run beside those of the product, and say what they cannot have."""

import dataclasses
import json

import pytest

from loopq.analysis.diagnosis import survey
from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.sections import SECTIONS, in_order
from loopq.settings.execution import Execution
from tests.support.diagnosed import OURS, Notes
from tests.support.looptoys import BlindSystem, LinearLoop, LinearSystem, tokens

PAPERS = ["displacement", "perturbation", "jacobian", "bypass"]
QUICK = DiagnoseConfig(n_prompts=2, n_jacobian_prompts=1, seeds=(0, 1), n_directions=4, n_updates=2)


def test_all_sections_run_after_the_products_and_give_plain_json():
    notes = Notes()
    diagnosis = survey.diagnose(
        Context(
            LinearSystem(LinearLoop(width=8)),
            tokens(n_prompts=3, n_tokens=12),
            5,
            QUICK,
            train=tokens(seed=3),
            execution=Execution(threads=1, progress=notes),
        ),
        only=PAPERS,
        name="toy",
    )
    assert list(in_order()) == OURS + PAPERS
    assert list(diagnosis["sections"]) == PAPERS
    assert diagnosis["unavailable"] == []
    assert json.loads(json.dumps(diagnosis, allow_nan=False)) == diagnosis
    assert {"displace", "perturb", "train", "jacobian", "bypass"} <= set(notes.stages)
    estimate = diagnosis["estimate"]["sections"]
    # 2 prompts: the reference, four variants of each seed, and six rollouts for an update of the trained one.
    assert estimate["perturbation"]["n_prompt_rollouts"] == 2 * (4 * 2 + 1) + 6 * 2
    assert estimate["jacobian"]["n_prompt_rollouts"] == 0
    assert estimate["jacobian"]["seconds"] > 0


#: What the page reads of each section.
READ = {
    "bypass": {"bypass_agreement", "rows", "settings"},
    "displacement": {"layers", "settings"},
    "jacobian": {"acceptance", "prompts", "settings", "states"},
    "perturbation": {"locations", "norm", "rows"},
}


@pytest.mark.parametrize("name", PAPERS)
def test_its_data_has_what_the_page_reads(diagnosis, name):
    assert set(diagnosis["sections"][name]) == READ[name]


def test_systems_without_steps_say_what_is_missing():
    diagnosis = survey.diagnose(
        Context(
            BlindSystem(LinearLoop(width=8)), tokens(n_tokens=12), 5, QUICK, execution=Execution(threads=1)
        ),
        only=[*PAPERS, "groups"],
    )
    reasons = {u["section"]: u["reason"] for u in diagnosis["unavailable"]}
    assert set(reasons) == set(PAPERS)
    assert "single-step function" in reasons["jacobian"]
    assert "Jacobian" in reasons["jacobian"]
    assert "identity path" in reasons["perturbation"]


def test_the_spectral_radius_is_printed_with_its_acceptance(saved_model, command, monkeypatch):
    """The numbers themselves are those of `test_spectral`; here they are made up."""
    maps = {name: {"radius": {"estimate": value}} for name, value in (("reference", 0.9), ("changed", 0.8))}
    result = {
        "acceptance": {"n_accepted": 5, "n_maps": 6, "largest_residual": 2e-5, "largest_disagreement": 3e-4},
        "states": {"plain": {"maps": maps, "n_accepted": 1, "n_prompts": 2}},
    }
    section = dataclasses.replace(SECTIONS.get("jacobian"), run=lambda context: result)
    monkeypatch.setitem(SECTIONS._entries, "jacobian", section)
    code, text, err = command(
        "diagnose", saved_model, "--only", "jacobian", "--n-prompts", 2, "--seq-len", 24
    )
    assert code == 0, err
    assert (
        "spectral radius of a step: 5 of 6 maps meet the acceptance rules; mean 0.900, rounded 0.800 on 1 of 2 "
        "prompts; largest relative residual 2.0e-05, largest disagreement of two starts 3.0e-04"
    ) in text.splitlines()
