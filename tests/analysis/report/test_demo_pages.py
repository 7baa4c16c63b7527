"""`loopq demo --html`: the page of the embedded model, small, in a real browser.

It takes half a minute. The quick test of the same page, on a small system, is `test_page.py`.
"""

import json

import pytest

from loopq.analysis.commands import demo
from loopq.analysis.commands.demo import DemoPage
from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.report.sections import FIGURES
from loopq.calibrate.prompts import Take
from loopq.settings.execution import Execution
from tests.support.browser import check, needs_browser, opened

SMALL = DiagnoseConfig(
    n_prompts=2, n_ablation_prompts=2, n_jacobian_prompts=1, seeds=(0,), n_directions=2, n_updates=1,
    lambdas=(0.0, 1.0), group_sizes=(32, -1),
)  # fmt: skip


@pytest.mark.slow
@needs_browser
def test_page_of_the_embedded_model(monkeypatch, tmp_path):
    few = Take(2, seq_len=32)
    monkeypatch.setattr(
        demo.PAGES, "_entries", {"huginn_small": DemoPage(SMALL, lambda data: demo.embedded(few, few))}
    )
    (page,), left = demo.pages(tmp_path, execution=Execution(batch_size=2))
    assert left == []
    data = json.loads(page.with_suffix(".json").read_text("utf-8"))
    assert data["unavailable"] == []
    with opened(tmp_path / "profile") as browser:
        check(browser, page, n_figures=len(FIGURES.names()))
