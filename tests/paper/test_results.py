"""Tables are made model by model: what a model cannot have, and one that fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopq.errors import ConfigError
from loopq.evaluation.stats import Interval
from loopq.paper import results
from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, ONE, RTN, bars, curves, table
from loopq.paper.shown import Claim, PaperTable, Shown
from loopq.terminal.progress import Silent
from tests.support.browser import CUT, SMALL, WIDE, needs_browser, opened
from tests.support.paper import bench, found, save

#: Sizes of the letters of all figures on the screen, and where the headings of the panels of one stand.
LETTERS = """
[...document.querySelectorAll("svg text")].map((t) => parseFloat(getComputedStyle(t).fontSize)
  * t.closest("svg").getBoundingClientRect().width / t.closest("svg").viewBox.baseVal.width)
"""
TOPS = """
[...document.querySelectorAll("#figure-curves text")].filter((t) => t.textContent.endsWith("_small"))
  .map((t) => t.getBoundingClientRect().top)
"""


@pytest.mark.parametrize("kind", ["ouro", "mamba", "coconut", "control"])
def test_a_model_has_the_tables_that_it_can_have(kind: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"coconut": {"vocab_size": 259}}.get(kind, {})
    one = bench(save(tmp_path / kind, kind, **changes))
    names = ("rank", "depth-curve", "components", "mamba", "horizon", "algorithm")
    by_name = {name: results.make(name, [one], None, Silent()) for name in names}
    refused = {name for name, m in by_name.items() if m.refused}
    # One step is no evidence about loops: of such a model there is the scan alone.
    expected = {"components", "mamba"} if kind in ("ouro", "coconut") else set(names)
    assert refused == expected - ({"mamba"} if kind == "mamba" else set())
    for m in by_name.values():
        assert len(m.found) + len(m.refused) == 1


def test_one_model_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = (bench(save(tmp_path / n, "ouro", n_layers=1, total_ut_steps=2)) for n in ("good", "bad"))
    plain: Callable[..., Any] = Bench.measure

    def measure(self: Bench, variants: Any) -> Any:
        if self is bad:
            raise ConfigError("no")
        return plain(self, variants)

    monkeypatch.setattr(Bench, "measure", measure)
    measured = results.make("bits-per-byte", [bad, good], None, Silent())
    assert measured.refused == {"bad": "no"}
    assert [f["model"] for f in measured.found] == ["good"]


def test_scores_of_all_tables_are_one_family_and_few_units_none() -> None:
    def score(p: float, n: int = 500) -> Claim:
        return Claim("m", "t", "f", Interval(0.2, 0.1, 0.3, 0.95, "test", n), p=p)

    def table(*claims: Claim) -> results.Made:
        return results.Made(
            "rank", PaperTable((), "", "", None, lambda founds: Shown([])), (), {}, Shown([], claims)
        )

    plain = dataclasses.replace(score(0.0), p=None)
    few = dataclasses.replace(plain, interval=dataclasses.replace(plain.interval, n=4))
    made = results.judged([table(score(0.02), plain, score(0.5, 499)), table(few, score(0.03), score(0.001))])
    # Holm: three times the least, twice the next, and no less for the last.
    assert [[c.p for c in m.shown.claims] for m in made] == [[0.04, None], [0.04, pytest.approx(0.003)]]
    assert [[c.verdict for c in m.shown.claims] for m in made] == [["holds"] * 2] * 2
    (alone,) = results.judged([table(plain)])
    assert alone.shown.claims == [plain]


@pytest.mark.slow
@needs_browser
def test_figures_of_many_models_can_be_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = {RTN: 1.0, ONE: 0.7, ALL: 0.5, "GPTQ, all steps, adapter rotated": 0.4}
    founds = [
        found(**{n: ((k * rng.uniform(0.9, 1.1, 8)).tolist(), [1.0] * 8) for n, k in names.items()})
        | {"model": f"{kind}_small"}
        for kind in ("huginn", "ouro", "rllama", "loopformer")
    ]
    series = {f"{n} prompts, step 0": (range(1, 9), rng.uniform(90, 95, 8)) for n in (16, 64)}
    text = "The same text."
    shown = Shown(
        [table(founds, "A table", text)],
        pictures=lambda: [
            bars(founds, "bars", "Bars", text),
            curves([(f["model"], series) for f in founds], "curves", "Curves", text, ("x [1]", "y [%]")),
            curves([("one", series)], "one", "One model", text, ("x [1]", "y [%]")),
        ],
    )
    entry = PaperTable(("Table 1",), "Title", "What it showed.", None, lambda founds: shown)
    page = results.write([results.Made("rank", entry, (), {}, shown)], tmp_path)
    assert page.read_text("utf-8").count(f">{text}<") == 1
    sizes = set()
    with opened(tmp_path / "profile") as browser:
        for width in (1280, 1100):
            browser.show(page, width=width)
            assert browser.ask(SMALL) == []
            assert browser.ask(CUT) == []
            assert browser.ask(WIDE) == []
            sizes |= set(browser.ask(LETTERS))
        assert max(sizes) / min(sizes) < 1.35
        # Four panels make two rows, of three and one.
        tops = [round(y) for y in browser.ask(TOPS)]
        assert tops[0] == tops[1] == tops[2] < tops[3]


def test_nothing_made_is_nothing_to_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no table was made"):
        results.write([], tmp_path)
