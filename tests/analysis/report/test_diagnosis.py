"""A diagnosis on the page."""

from __future__ import annotations

import pytest

from loopq.analysis.diagnosis import survey
from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.report import page
from loopq.analysis.report.sections import FIGURES, all_figures
from loopq.errors import ConfigError
from tests.support.looptoys import BlindSystem, LinearLoop, tokens
from tests.support.pages import saved


def test_page_shows_the_whole_diagnosis(diagnosis, text):
    for layer in diagnosis["layers"]:
        assert layer["verdict"]["text"].split(".")[0] in text
    for line in diagnosis["summary"]:
        assert line in text
    assert f"numpy</th><td>{diagnosis['versions']['numpy']}" in text
    assert saved(text) == {"diagnosis": diagnosis}
    names = [p.name for p in all_figures(diagnosis)]
    assert names == ["loop", "ranks", "spectra", "rollout", "feedback", "ablation", "groups", "proxy"]
    assert set(names) <= set(FIGURES.names())


@pytest.mark.slow
def test_systems_without_steps_have_a_page_that_says_why():
    diagnosis = survey.diagnose(
        Context(
            BlindSystem(LinearLoop(width=8)),
            tokens(n_tokens=12),
            5,
            DiagnoseConfig(n_prompts=2, n_ablation_prompts=2, seeds=(0,)),
        ),
        only=["ranks", "ablation", "feedback"],
    )
    text = page.render(diagnosis)
    assert "Parts that could not run" in text
    assert "has no single-step function" in text
    assert "Every layer has an identity path" in text


def test_other_data_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a diagnosis"):
        page.render({})
    with pytest.raises(ConfigError, match="version 9"):
        page.write_data({"format": "loopq-diagnosis", "version": 9}, tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []
