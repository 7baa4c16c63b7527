"""The whole diagnosis: every section, reasons for leaving one out, resuming, dumps and verdicts."""

import json

import numpy as np

from loopq.analysis.diagnosis import survey
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.sections import in_order
from loopq.settings.execution import Execution
from tests.support.diagnosed import OURS, QUICK
from tests.support.looptoys import BlindSystem, LinearLoop, tokens


def test_every_section_runs_and_the_result_is_plain_json(whole):
    diagnosis, _ = whole
    assert list(diagnosis["sections"]) == OURS
    assert [name for name in in_order() if name in OURS] == OURS
    assert diagnosis["unavailable"] == []
    assert json.loads(json.dumps(diagnosis, allow_nan=False)) == diagnosis
    assert diagnosis["model"]["n_steps"] == 5
    assert set(diagnosis["seconds"]) == set(diagnosis["sections"])
    assert diagnosis["versions"]["numpy"] == np.__version__


def test_systems_without_steps_name_the_gaps_and_do_the_rest():
    diagnosis = survey.diagnose(
        Context(
            BlindSystem(LinearLoop(width=8)), tokens(n_tokens=12), 5, QUICK, execution=Execution(threads=1)
        ),
        only=OURS,
    )
    reasons = {u["section"]: u["reason"] for u in diagnosis["unavailable"]}
    assert set(reasons) == {"overlap", "feedback", "unpaired runs"}
    assert "single-step function, which the feedback intervention needs" in reasons["feedback"]
    assert set(diagnosis["sections"]) == {"ranks", "ablation", "injection", "groups"}
    assert diagnosis["layers"][0]["verdict"]["exposed"] is False


def test_not_finite_numbers_become_none():
    assert survey.clean({"a": np.float64("nan"), "b": (1, np.inf), "c": np.int64(3)}) == {
        "a": None,
        "b": [1, None],
        "c": 3,
    }
