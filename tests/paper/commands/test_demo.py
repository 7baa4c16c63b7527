"""The page of PL-BERT in `loopq demo --html`, small, in a real browser."""

from __future__ import annotations

import dataclasses
import html
import json
from pathlib import Path

import pytest

from loopq.analysis.commands import demo
from loopq.analysis.diagnosis import rank
from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.report.sections import all_figures
from loopq.cli import main
from loopq.paper.commands import demo as plbert_page
from loopq.paper.plbert import PLBERT, phonemes
from loopq.settings.execution import Execution
from tests.support.browser import check, needs_browser, opened

SMALL = DiagnoseConfig(
    n_prompts=2, n_ablation_prompts=2, n_jacobian_prompts=1, seeds=(0,), n_directions=2, n_updates=1,
    lambdas=(0.0, 1.0), group_sizes=(32, -1),
)  # fmt: skip


def only_plbert(monkeypatch):
    """Leave its page alone in the demo, with few prompts."""
    page = dataclasses.replace(demo.PAGES.get(PLBERT), config=SMALL)
    monkeypatch.setattr(demo.PAGES, "_entries", {PLBERT: page})


@pytest.mark.slow
@needs_browser
@pytest.mark.data
def test_page_of_plbert_says_what_it_cannot_have(monkeypatch, tmp_path, data_folder: Path):
    # Ranks of the widest input at half of the steps: an eigenvalue problem of 2,048 takes seconds.
    monkeypatch.setattr(rank, "_MAX_DIM_ALL_STEPS", 1024)
    only_plbert(monkeypatch)
    monkeypatch.setattr(plbert_page, "phonemes", lambda data, use, *_: phonemes(data, use, 24, 2))
    (page,), left = demo.pages(tmp_path, data=data_folder, execution=Execution(batch_size=2))
    assert left == []
    data = json.loads(page.with_suffix(".json").read_text("utf-8"))
    reasons = {u["section"]: u["reason"] for u in data["unavailable"]}
    assert set(reasons) >= {"agreement and KL", "unpaired runs"}
    assert "hidden states and no logits" in reasons["agreement and KL"]
    assert "not random" in reasons["unpaired runs"]
    assert set(data["sections"]) >= {"ranks", "overlap", "ablation", "injection", "feedback", "groups"}
    text = page.read_text("utf-8")
    shown = text[text.index('id="unavailable"') : text.index('<section id="again">')]
    assert all(html.escape(reason) in shown for reason in reasons.values())
    with opened(tmp_path / "profile") as browser:
        check(browser, page, n_figures=len(all_figures(data)))


def test_plbert_is_left_out_with_a_word_where_it_is_not(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("LOOPQ_DATA", raising=False)
    only_plbert(monkeypatch)
    for data in (None, tmp_path):
        written, (word,) = demo.pages(tmp_path / "out", data=data)
        assert written == []
        assert word.startswith("plbert: no page: its weights are not in")
    assert main(["demo", "--html", str(tmp_path / "out"), "--data", str(tmp_path)]) == 0
    assert "plbert: no page" in capsys.readouterr().out
