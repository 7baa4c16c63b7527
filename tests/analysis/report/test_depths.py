"""The page of several depths: a row for each, also of models that give no logits and generate no text."""

from __future__ import annotations

import pytest

from loopq.analysis.report import depths
from loopq.analysis.report.depths import write_depths


@pytest.mark.parametrize(("output", "head"), [("logits", "same token [%]"), ("hidden", "cosine")])
def test_a_row_for_each_depth_and_one_picture(tmp_path, output, head):
    rows = [
        {"name": name, "n_steps": depth, "output": output, "kl": kl * depth, "agreement": 0.75,
         "tokens_per_second": None if output == "hidden" else 10.0 / depth}
        for depth in (1, 4)
        for name, kl in (("full precision", 0.0), ("Q", 0.125))
    ]  # fmt: skip
    said = {"n_prompts": 2, "n_tokens": 9, "source": "a text"}
    page = write_depths(tmp_path / "d.html", "toy", rows, said).read_text()
    assert (page.count("<svg"), page.count("<tr>")) == (1, 5)
    assert f">{head}<" in page
    assert ">0.50000<" in page
    assert (">2.5<" in page) == (output == "logits")


def rows(output="logits"):
    """Full precision and two checkpoints at depths 1 and 4."""
    return [
        {"name": name, "n_steps": depth, "output": output, "kl": kl * depth, "agreement": 0.75 - kl,
         "tokens_per_second": None if name == "full" or output == "hidden" else 10.0 * depth}
        for depth in (1, 4)
        for name, kl in (("full", 0.0), ("Q", 0.125), ("R", 0.25))
    ]  # fmt: skip


def test_each_checkpoint_has_a_line_in_each_panel():
    picture = depths._picture(rows(), ["KL [nats per token]", "same token [%]", "tokens per second"])
    kl, same, speed = picture.figure.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in kl.get_lines()}
    # Full precision has no distance to itself.
    assert lines == {"Q": [[1, 0.125], [4, 0.5]], "R": [[1, 0.25], [4, 1.0]]}
    assert [line.get_xydata().tolist() for line in same.get_lines()] == [
        [[1, 62.5], [4, 62.5]],
        [[1, 50], [4, 50]],
    ]
    assert {line.get_label(): line.get_xydata().tolist() for line in speed.get_lines()} == {
        "Q": [[1, 10], [4, 40]], "R": [[1, 10], [4, 40]]
    }  # fmt: skip
    assert [a.get_ylabel() for a in picture.figure.axes] == [
        "KL [nats per token]", "same token [%]", "tokens per second [number]"
    ]  # fmt: skip
    assert [a.get_legend() is not None for a in picture.figure.axes] == [False, False, True]
    # A checkpoint has one colour in all panels.
    assert [a.get_color() for a in kl.get_lines()] == [a.get_color() for a in speed.get_lines()]
    assert len({a.get_color() for a in kl.get_lines()}) == 2


def test_without_speeds_the_first_panel_has_the_legend():
    picture = depths._picture(rows("hidden"), ["squared relative error", "cosine", "tokens per second"])
    assert [a.get_legend() is not None for a in picture.figure.axes] == [True, False, False]
    assert picture.figure.axes[1].get_lines()[0].get_ydata().tolist() == [0.625, 0.625]


def test_warnings_are_told_once_and_shares_in_percent(tmp_path):
    warned = [row | ({"warning": "seen"} if row["name"] == "Q" else {}) for row in rows()]
    said = {"n_prompts": 2, "n_tokens": 9, "source": "a text"}
    page = write_depths(tmp_path / "d.html", "toy", warned, said).read_text()
    intro = page.split('class="intro">')[1].split("</p>")[0]
    assert intro.startswith("2 prompts, 9 tokens of a text.")
    assert intro.count(" Q: seen.") == 1
    assert ">62.50<" in page
    hidden = write_depths(tmp_path / "h.html", "toy", rows("hidden"), said).read_text()
    assert ">0.62500<" in hidden
