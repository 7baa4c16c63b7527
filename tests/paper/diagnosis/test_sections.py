"""The paper's sections in a diagnosis: they run beside those of the product, and say what they cannot have."""

import json

from loopq.analysis.diagnosis import survey
from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.sections import in_order
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
