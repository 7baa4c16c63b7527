"""Claims are judged by paired intervals."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loopq.evaluation.stats import Interval
from loopq.paper import compared
from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, FULL, ONE, RTN, answers, below, closed, closer, grown, most
from loopq.paper.shown import TABLES
from loopq.paper.tables import step_window
from tests.support.paper import difference, found


def test_claims_are_judged_by_paired_intervals() -> None:
    rng = np.random.default_rng(0)
    base = rng.uniform(0.5, 2.0, 40)
    right = [1.0] * 30 + [0.0] * 10
    wrong = [0.0] * 30 + [1.0] * 10
    given = found(
        a=((0.5 * base).tolist(), right),
        b=(base.tolist(), wrong),
        c=((base + rng.normal(0, 0.3, 40)).tolist(), right),
    )
    assert below(given, "a", "b").holds is True
    assert below(given, "b", "a").holds is False
    assert below(given, "c", "b").holds is None
    assert "KL ratio 0.500" in below(given, "a", "b").found
    (better,) = answers(given, "a", "b")
    # 30 against 10 discordant answers: p = 0.0022 in any table of the binomial distribution.
    assert better.p == pytest.approx(0.0022, abs=5e-5)
    assert "p = 0.0022" in better.found
    assert "+50.0 points" in better.found
    # Forty answers decide nothing, and 25 times as many do.
    assert (better.asked, better.holds) == (False, None)
    many = found(a=([1.0], 25 * right), b=([1.0], 25 * wrong), c=([1.0], [0.0, *(25 * right)[1:]]))
    assert answers(many, "a", "b")[0].holds is True
    assert answers(many, "b", "a")[0].holds is False
    assert [c.verdict for c in answers(many, "a", "c")] == ["makes no difference"]


#: Tables of variants that `Bench.measure` compares.
COMPARED = (
    "awq", "bits-per-byte", "closed-loop", "components", "horizon", "int3", "intervals", "per-channel", "rank-survey",
    "rotations", "step-window",
)  # fmt: skip


@pytest.mark.parametrize("name", COMPARED)
def test_a_pair_differs_in_the_one_thing_that_is_named(
    name: str, huginn: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def measure(self: Bench, variants: dict[str, Any]) -> dict[str, Any]:
        given.update({FULL: None} | variants)
        rng = np.random.default_rng(0)
        rows = {
            n: {k: rng.uniform(1, 2, 6).tolist() for k in ("kl", "agreement", "nll")}
            | {"answered": rng.integers(0, 2, 600).tolist(), "n_bytes": 1}
            for n in given
        }
        return self.head() | {"bytes_per_token": 1.0, "cures": list(self.cures()), "variants": rows}

    monkeypatch.setattr(Bench, "measure", measure)
    monkeypatch.setattr(Bench, "solve", lambda self, config: config)
    monkeypatch.setattr(step_window, "_late", lambda *of: (1, 1))
    planted = copy.copy(huginn)
    planted.source = dataclasses.replace(
        huginn.source, planted="spike", planted_in=("transformer.core_block.0.mlp.proj.weight",)
    )
    entry = TABLES.get(name)
    for model in (huginn, planted):
        claims = [c for c in entry.show([entry.measure(model)]).claims if c.pair]
        assert claims
        for c in claims:
            differs = c.differs.replace("the planted", "some")
            assert difference(model, *(given[n] for n in c.pair)) == differs, c.line()


def test_the_three_of_the_main_table_differ_in_calibration(huginn: Bench) -> None:
    variants = compared.three(huginn)
    for pair in itertools.combinations(variants.values(), 2):
        assert difference(huginn, *pair) == compared.CALIBRATION


def test_every_table_of_compared_variants_is_walked() -> None:
    folder = Path(compared.__file__).parent / "tables"
    using = {file.stem for file in folder.glob("*.py") if "bench.measure(" in file.read_text("utf-8")}
    assert {n.replace("-", "_") for n in COMPARED} == using


def test_gap_closed_is_the_share_of_the_kl_of_rounding() -> None:
    given = {"variants": {RTN: {"kl": [2.0, 4.0]}, ALL: {"kl": [1.0, 0.5]}, ONE: {"kl": [4.0, 5.0]}}}
    assert closed(given, ALL) == pytest.approx(0.75)
    assert closed(given, ONE) == pytest.approx(-0.5)


def test_small_differences_and_few_units_decide_nothing() -> None:
    worse = np.linspace(1e-5, 2e-5, 40)
    assert closer("m", "", worse / 10, worse, "x").holds is None
    assert closer("m", "", worse / 10, worse, "x").verdict == "makes no difference"
    assert closer("m", "", 100 * worse, 1000 * worse, "x").holds is True
    assert closer("m", "", [0.1] * 4, [0.2] * 4, "x").holds is None
    assert closer("m", "", [0.1] * 5, [0.2] * 5, "x").holds is True
    # Two equal means of values that differ: an interval beyond the resolution leaves the pair open.
    swing = 0.01 * np.resize([1.0, -1.0], 40)
    by_chance = closer("m", "", 0.02 + swing, 0.02 - swing, "x")
    assert (by_chance.interval.estimate, by_chance.verdict) == (pytest.approx(1.0), "is left open")
    same, apart = 1 + 0.01 * np.sin(np.arange(40.0)), 1 + np.sin(np.arange(40.0))
    assert closer("m", "", same, np.ones(40), "x").verdict == "makes no difference"
    assert closer("m", "", apart, np.ones(40), "x").verdict == "is left open"
    assert compared.higher("m", "", same / 2, [0.5] * 40, "x").verdict == "makes no difference"
    assert compared.higher("m", "", apart / 2, [0.5] * 40, "x").verdict == "is left open"
    one = (True,)
    assert most("m", "", [*one * 4], "x").holds is None
    assert most("m", "", [*one * 9, False], "x").holds is True
    assert most("m", "", [*one * 5, False, False, False], "x").holds is None
    assert most("m", "", [False] * 9, "x").holds is False
    assert grown("m", "", [3, 4, 5, 6, 7], [1, 1, 2, 2, 2], "x", bound=2.0).holds is True
    assert grown("m", "", [43], [1], "x").holds is None


def variants(**more: object) -> dict[str, object]:
    kl = {FULL: 0.0, "b": 0.25, "c": 0.5}
    rows = {
        name: {
            "kl": [k] * 5, "agreement": [1 - k] * 5, "nll": [2 + k] * 5, "answered": [1.0] * 4 + [0.0], "n_bytes": 2500
        }
        for name, k in kl.items()
    }  # fmt: skip
    return {"model": "m", "output": "logits", "bytes_per_token": 2.0, "variants": rows} | more


def test_a_row_has_a_variant_with_intervals_and_units() -> None:
    bit = 2 * np.log(2)
    # Wilson's interval of 4 of 5 answers.
    right = "80 % [38, 96]"
    full, b, _ = compared.table([variants()], "t").rows
    assert full == ("m", FULL, None, None, None, right, f"{2 / bit:.3f}", "2.5")
    assert b == ("m", "b", "0.25", "[0.25, 0.25]", "75.0 %", right, f"{2.25 / bit:.3f}", "2.5")
    given = variants(bytes_per_token=None)
    given["variants"]["b"] |= {"answered": None, "n_bytes": None}  # type: ignore[index]
    assert compared.row(given, "b")[5:] == (None, None, None)
    assert compared.bits_per_byte(variants(), "b") == pytest.approx([2.25 / bit] * 5)
    given["variants"]["b"]["nll"] = None  # type: ignore[index]
    assert compared.bits_per_byte(given | {"bytes_per_token": 2.0}, "b") is None


def test_bars_reach_from_end_to_end_of_the_interval() -> None:
    uneven = variants()
    uneven["variants"]["b"]["kl"] = [0.1, 0.2, 0.6]  # type: ignore[index]
    picture = compared.bars([uneven, variants(output="hidden")], "n", "T", "C")
    first, second = picture.figure.axes
    assert picture.figure.get_size_inches() == pytest.approx((12.0, 1.2 + 0.34 * 3))
    assert [t.get_text() for t in first.get_yticklabels()] == ["c", "b"]
    points, _, (bars,) = first.containers[0]
    assert points.get_xydata().tolist() == [[0.5, 0], [pytest.approx(0.3), 1]]
    low, high = bars.get_segments()[1][:, 0]
    assert 0.1 <= low < 0.3 < high <= 0.6
    flat = bars.get_segments()[0][:, 0]
    assert flat.tolist() == [0.5, 0.5]
    assert (first.get_xlabel(), second.get_xlabel()) == (
        "KL to full precision [nats]",
        "squared error [ratio]",
    )
    assert first.get_title() == "m"
    assert (picture.name, picture.title, picture.caption) == ("n", "T", "C")


def test_curves_share_one_legend_and_whole_numbers() -> None:
    models = [
        ("a", {"x": ([1, 2], [3.0, 4.0])}),
        ("b", {"x": ([1, 2], [3.0, 4.0]), "y": ([1, 2], [5.0, 6.0])}),
    ]
    picture = compared.curves(models, "n", "T", "C", ("steps [number]", "y [ratio]"))
    first, second = picture.figure.axes
    assert (first.get_title(), second.get_title(), first.get_ylabel()) == ("a", "b", "y [ratio]")
    assert (first.get_xscale(), first.get_yscale()) == ("linear", "linear")
    assert [t.get_text() for t in picture.figure.legends[0].get_texts()] == ["x", "y"]
    picture.figure.canvas.draw()
    assert all(float(tick).is_integer() for tick in first.get_xticks())
    broken = [("a", {"x": ([0.5, 0.75], [3.0, 4.0])})]
    alone = compared.curves(broken, "n", "T", "C", ("x [ratio]", "y [ratio]"))
    assert alone.figure.legends == []
    alone.figure.canvas.draw()
    assert not all(float(tick).is_integer() for tick in alone.figure.axes[0].get_xticks())
    scaled = compared.curves(broken, "n", "T", "C", ("x [ratio]", "y [ratio]"), log=True).figure.axes[0]
    assert (scaled.get_xscale(), scaled.get_yscale()) == ("log", "log")
    # Of many points each tenth of the way has a marker.
    for n, every in ((40, None), (41, 0.1)):
        long = [("a", {"x": (list(range(n)), list(range(n)))})]
        (drawn,) = compared.curves(long, "n", "T", "C", ("x [ratio]", "y [ratio]")).figure.axes[0].get_lines()
        assert drawn.get_markevery() == every


def test_variants_are_shown_with_the_claims_that_apply() -> None:
    show = compared.show_variants("n", "T", "C", lambda result: [below(result, "b", "c")])
    shown = show([variants()])
    assert [c.text for c in shown.claims] == ["b is closer than c"]
    assert shown.claims[0].holds is True
    assert [t.title for t in shown.tables] == ["T"]
    assert [p.name for p in shown.pictures()] == ["n"]


def test_cures_are_claims_of_planted_models_alone() -> None:
    assert compared.cured(variants(), "c", "b") == []
    given = variants(cures=["b, groups of 32", "d"])
    rows: Any = given["variants"]
    rows["b, groups of 32"] = rows["b"]
    (claim,) = compared.cured(given, "c", "b")
    assert (claim.text, claim.differs) == ("b, groups of 32 is closer than c", "group size")
    assert compared.cured(given, "c", "x") == []


def test_numbers_of_claims_are_written_with_their_ends() -> None:
    gain = Interval(0.25, 0.125, 0.5, 0.95, "test", 500)
    claim = compared.paired_shares("m", "t", gain, 0.04, "x")
    assert claim.found == "+25.0 points [+12.5, +50.0], exact McNemar p = 0.04"
    assert claim.holds is True
    assert compared.paired_shares("m", "t", gain, 0.05, "x").holds is None
    assert compared.span(gain, 2) == "0.25 [0.12, 0.50]"
    assert (
        compared.higher("m", "t", [0.75] * 5, [0.5] * 5, "x").found
        == "+25.0 points of agreement [+25.0, +25.0]"
    )
    assert most("m", "t", [True, False], "x").found == "1 of 2 layers"
    assert compared.ratio([1.0, 3.0], [4.0, 4.0]).estimate == 0.5
    for low, high, decides in (
        (-2e-4, -1e-4, True),
        (-5e-5, 2e-4, True),
        (-5e-5, 5e-5, False),
        (1e-4, 1e-4, True),
    ):
        assert (compared.unresolved(Interval(0.0, low, high, 0.95, "", 9)) == "") is decides
    assert closer("m", "t", [2.0] * 5, [4.0] * 5, "x").found == "KL ratio 0.500 [0.500, 0.500]"
    assert answers(variants() | {"variants": {n: {"answered": None} for n in "ab"}}, "a", "b") == []


def test_a_model_is_told_why_it_has_no_table() -> None:
    def bench(output: str, *exposed: bool) -> Any:
        system = SimpleNamespace(
            output=output, shared_parameters=lambda depth: [SimpleNamespace(exposed=e) for e in exposed]
        )
        return SimpleNamespace(system=system, depth=3)

    assert compared.without_logits(bench("logits")) is None
    assert "no logits" in str(compared.without_logits(bench("hidden")))
    assert compared.without_exposed(bench("logits", False, True)) is None
    assert "no layer is feedback-exposed" in str(compared.without_exposed(bench("logits", False)))
    assert "no logits" in str(compared.without_exposed(bench("hidden", True)))
