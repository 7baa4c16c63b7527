"""What each table says of what was measured: its rows, its claims with their verdicts, its picture."""

from __future__ import annotations

import math
from typing import Any

import pytest

from loopq.paper.compared import ALL, ONE, RTN
from loopq.paper.tables import (
    agreement,
    algorithm,
    displacement,
    factors,
    group_size,
    injection,
    intervals,
    mamba,
    perturbation,
    rank,
    sensitivity,
    size,
    spectra,
)
from loopq.paper.tables.size import HUGINN, huginn_bytes

# Section 5: agreement by step.


def test_the_last_step_of_each_variant_is_compared() -> None:
    def run(*agreement: float, last: float) -> dict[str, Any]:
        by_prompt = {"agreement": [last] * 6}
        return {
            "agreement": agreement, "agreement_pooled": [0.3, last], "steps": [1, 2], "last": by_prompt
        }  # fmt: skip

    runs = {RTN: run(0.5, 0.25, last=0.2), ONE: run(0.5, 0.5, last=0.6), ALL: run(0.75, 1.0, last=0.5)}
    shown = agreement.show([{"model": "m", "runs": runs}])
    assert shown.tables[0].rows == (
        ("m", RTN, "50.0, 25.0", "20.0 %"), ("m", ONE, "50.0, 50.0", "60.0 %"), ("m", ALL, "75.0, 100.0", "50.0 %")
    )  # fmt: skip
    assert [(c.holds, c.found) for c in shown.claims] == [
        (True, "+30.0 points of agreement [+30.0, +30.0]"), (False, "-10.0 points of agreement [-10.0, -10.0]")
    ]  # fmt: skip
    (picture,) = shown.pictures()
    lines = picture.figure.axes[0].get_lines()
    assert [x.get_ydata().tolist() for x in lines] == [[50, 25], [50, 50], [75, 100]]


# Algorithm 1: trajectory calibration, layer by layer.


def test_losses_are_relative_to_those_of_rounding() -> None:
    def layer(*all_steps: float) -> dict[str, Any]:
        rtn = [4.0] * len(all_steps)
        return {
            "steps": len(all_steps),
            "losses": {RTN: rtn, ONE: [1.0, 8.0][: len(rtn)], ALL: list(all_steps)},
        }

    layers = {f"c.{i}.weight": layer(2.0, 2.0) for i in range(5)} | {"c.e.weight": layer(40.0)}
    shown = algorithm.show([{"model": "m", "layers": layers}])
    rows = shown.tables[0].rows
    assert rows[0][2:] == ("2", "0.250", "0.500", "1.125", "0.500")
    assert rows[5][2:] == ("1", "0.250", "10.000", "0.250", "10.000")
    # Layers of a single step have no trajectory and do not count.
    assert [(c.found, c.holds) for c in shown.claims] == [("5 of 5 layers", True)] * 2


# Appendices H and L: displacement and its prediction.


def test_a_prediction_may_be_off_by_a_factor() -> None:
    def prompt(measured: float, linear: float, bound: float | None) -> dict[str, float | None]:
        return {"measured": measured, "linear": linear, "defect": 1.0, "modulus": 0.5, "bound": bound}

    good = [
        prompt(1.0, 1.25, 2.0),
        prompt(2.0, 1.6, 1.0),
        *[prompt(1.0, 1.25, 2.0)] * 4,
        prompt(0.0, 1.0, None),
    ]
    shown = displacement.show(
        [{"model": "m", "rows": {"per channel": good, "grouped": [prompt(4.0, 1.0, None)] * 5}}]
    )
    assert shown.tables[0].rows == (
        ("m", "per channel", "1", "1.26", "1", "0.5", "1.83 (6)"), ("m", "grouped", "4", "1", "1", "0.5", None)
    )  # fmt: skip
    within, kept, off = shown.claims
    # Too large and too small by a quarter are equally wrong.
    assert (within.holds, within.found) == (True, "off by 1.25 [1.25, 1.25]")
    assert kept.found == "5 of 6 prompts"
    assert (off.holds, off.found) == (False, "off by 4.00 [4.00, 4.00]")
    one = displacement.show([{"model": "m", "rows": {"grouped": [prompt(4.0, 1.0, None)]}}])
    assert one.claims == []


# Equation 2: factors of a step's Jacobian.


def test_a_wrong_product_and_an_identity_adapter_are_reported() -> None:
    def prompts(gap: float, adapter: float) -> list[dict[str, object]]:
        identity = {"adapter": adapter, "block.0": 0.9, "block.1": 0.5}
        return [{"gap": gap, "gain": dict.fromkeys(identity, 1.0), "identity": identity}] * 6

    for gap, adapter, holds in ((1e-6, 0.1, True), (0.2, 0.7, False)):
        result = {"model": "m", "rows": prompts(gap, adapter)}
        assert [c.holds for c in factors.show([result]).claims] == [holds, holds]


# Table 17: group size of rounding.


def test_agreement_is_shown_early_later_and_at_the_end() -> None:
    def row(size: int, agreement: list[float], kl: float) -> dict[str, Any]:
        last = {"kl": [kl * k for k in (1.0, 1.1, 0.9, 1.0, 1.05)]}
        steps = list(range(1, len(agreement) + 1))
        return {"group_size": size, "agreement": agreement, "steps": steps, "kl": [9.0, kl], "last": last}

    rows = [row(32, [0.5, 0.6, 0.7, 0.8, 0.9], 0.1), row(64, [0.4], 0.2), row(-1, [0.1, 0.2], 0.4)]
    found: dict[str, Any] = {"model": "m", "width": 65, "rows": rows}
    shown = group_size.show([found])
    assert shown.tables[0].rows == (
        ("m", "g = 32", "50.0 % (N = 1)", "60.0 % (N = 2)", "90.0 % (N = 5)", "0.1"),
        ("m", "g = 64", "40.0 % (N = 1)", None, None, "0.2"),
        ("m", "per channel", "10.0 % (N = 1)", "20.0 % (N = 2)", None, "0.4"),
    )
    # The worst of the groups, not the worst of all.
    (claim,) = shown.claims
    assert claim.text.startswith("the worst group size, 64,")
    assert (claim.holds, claim.found.split()[:3]) == (True, ["KL", "ratio", "0.500"])
    # A group as wide as the narrowest input is no group there.
    (narrow,) = group_size.show([found | {"width": 64}]).claims
    assert narrow.text.startswith("the worst group size, 32,")
    assert group_size.show([found | {"width": 32}]).claims == []
    (picture,) = shown.pictures()
    (axes,) = picture.figure.axes
    assert {x.get_label(): x.get_xydata().tolist() for x in axes.get_lines()} == {
        "g = 32": [[1, 50], [2, 60], [3, 70], [4, 80], [5, 90]], "g = 64": [[1, 40]], "per channel": [[1, 10], [2, 20]]
    }  # fmt: skip


# Figure 1a, Tables 3 and 4: one scale per row in parts of the loop.


def test_parts_of_the_loop_are_compared_at_the_last_step() -> None:
    def run(first: float, last: float) -> dict[str, Any]:
        return {
            "agreement": [first, last],
            "steps": [1, 2],
            "kl": [9.0, 1 - last],
            "last": {"agreement": [last] * 5},
        }

    paired = {"none": run(1, 1), injection.EXPOSED: run(0.5, 0.25), injection.CORE: run(0.75, 0.75),
              injection.ALL: run(0.5, 0.2), injection.GAUSSIAN: run(0.5, 0.2)}  # fmt: skip
    cured = paired | {injection.EXPOSED: run(0.5, 0.5)}
    shown = injection.show([{"model": "m", "runs": {"paired": paired, injection.GROUPED: cured}}])
    rows = shown.tables[0].rows
    assert len(rows) == 10
    assert rows[1] == ("m", "paired", "exposed layers", "50.0 %", "25.0 %", "[25.0, 25.0]", "0.75")
    assert [c.found.split()[0] for c in shown.claims] == ["+25.0", "+50.0", "-5.0"]
    assert [c.holds for c in shown.claims] == [True, True, False]
    (picture,) = shown.pictures()
    lines = picture.figure.axes[0].get_lines()
    assert [x.get_label() for x in lines] == [injection.WORDS[n] for n in paired if n != "none"]
    assert lines[0].get_xydata().tolist() == [[1, 50], [2, 25]]
    plain = injection.show([{"model": "m", "runs": {"paired": paired}}])
    assert len(plain.claims) == 2


# Table 24: Wilson intervals of the scores.


def test_counts_become_shares_with_their_intervals() -> None:
    one, none = [1.0] * 6 + [0.0] * 2, [0.0] * 8
    variants = {RTN: none, ONE: none, ALL: one}
    shown = intervals.show([{"model": "m", "variants": {n: {"answered": v} for n, v in variants.items()}}])
    (table,) = shown.tables
    assert len(table.rows) == 8 + 3
    # Wilson: (p + z^2/2n +- z sqrt(p (1 - p) / n + z^2/4n^2)) / (1 + z^2/n) for 460 of 1,319 and 6 of 8.
    assert table.rows[0] == ("Huginn 3.5B (paper)", "full precision", "460 of 1319", "34.9 %", "[32.4, 37.5]")
    assert table.rows[-1] == ("m", ALL, "6 of 8", "75.0 %", "[40.9, 92.9]")
    assert shown.lines == ["Of the paper's intervals 8 of 8 come out of its counts."]
    assert [(c.text, c.asked) for c in shown.claims] == [
        (f"{ALL} gets more last tokens right than {other}", False) for other in (RTN, ONE)
    ]


# Table 21: errors in a selective scan.


def test_growth_and_the_identity_term_are_compared() -> None:
    def component(name: str, kind: str, start: float, late: float, growth: float | None) -> dict[str, Any]:
        return {"component": name, "perturbation": kind, "start": start, "late": late, "growth": growth}

    def alpha(value: float, relative: float) -> dict[str, Any]:
        return {
            "alpha": value, "relative": relative, "absolute": 3.0, "norm": 4.5, "largest_multiplier": 1 + value,
            "by_prompt": [relative * k for k in (1.0, 1.1, 0.9, 1.0, 1.2)],
        }  # fmt: skip

    result = {
        "model": "m",
        "components": [component("A_log", "int4", 0.125, 0.5, 4.0), component("out_proj", "int4", 0.25, 0.75, None),
                       component("out_proj", "noise", 9.0, 9.0, 1.0)],
        "alphas": [alpha(0.0, 0.5), alpha(0.25, 0.25)],
        "growth": [[0.1] * 5, [0.3] * 5],
    }  # fmt: skip
    shown = mamba.show([result])
    parts, sweep = shown.tables
    assert parts.rows[:2] == (
        ("m", "A_log", "int4", "0.125", "0.5", "4.00x"), ("m", "out_proj", "int4", "0.25", "0.75", None)
    )  # fmt: skip
    assert sweep.rows == (
        ("m", "0.00", "0.500", "+0 %", "3", "4.5", "1.00"), ("m", "0.25", "0.250", "-50 %", "3", "4.5", "1.25")
    )  # fmt: skip
    assert shown.lines == ["m: error by A_log at token 0: 0.12; by out_proj at token 32: 0.75."]
    grows, lowers = shown.claims
    assert (grows.holds, grows.found) == (True, "+20.0 percent of the state [+20.0, +20.0]")
    assert (lowers.holds, lowers.found) == (True, "error ratio 0.500 [0.500, 0.500]")
    (picture,) = shown.pictures()
    assert picture.figure.axes[0].get_lines()[0].get_xydata().tolist() == [[0, 0.5], [0.25, 0.25]]


# Table 15: perturbations other than rounding.


def test_places_are_compared_over_the_mean_of_seeds() -> None:
    def row(kind: str, place: str, agreement: float) -> dict[str, Any]:
        return {"perturbation": kind, "location": place, "last": {"agreement": [agreement] * 5}}

    rows = [
        row("noise", "exposed", 0.5), row("noise", "exposed", 0.7), row("noise", "core", 0.75),
        row("rank-4", "core", 0.2), row("rank-4", "exposed", 0.3),
    ]  # fmt: skip
    shown = perturbation.show([{"model": "m", "rows": rows}])
    assert shown.tables[0].rows == (
        ("m", "noise", "60.0 %", "75.0 %", "+15.0"), ("m", "rank-4", "30.0 %", "20.0 %", "-10.0")
    )  # fmt: skip
    assert [(c.text.partition(":")[0], c.holds) for c in shown.claims] == [("noise", True), ("rank-4", False)]


# Tables 1 and 19: rank of each layer's input, step by step.


def test_ranks_by_step_and_their_growth() -> None:
    def layer(*ranks: int, gain: float | None) -> dict[str, Any]:
        return {"dim": 40, "per_step": list(ranks), "all": 2 * ranks[-1], "gain": gain}

    layers = {
        "c.a.weight": layer(2, 4, 8, gain=8.0),
        "c.b.weight": layer(10, gain=None),
        "c.d.weight": layer(5, 10, gain=4.0),
        "c.e.weight": layer(4, 8, gain=3.0),
    }
    shown = rank.show([{"model": "m", "layers": layers, "adapters": []}])
    assert shown.tables[0].rows[:2] == (
        ("m", "a", "40", "2", "5.00 %", "4", "8", "16", "8.00x"),
        ("m", "b", "40", "10", "25.00 %", None, "10", "20", None),
    )
    # Ratios of last and first step: 4, 2 and 2, without the layer of one step.
    (claim,) = shown.claims
    assert claim.found.startswith(f"{16 ** (1 / 3):.2f} [")
    assert claim.found.endswith("over 3 inputs")
    assert claim.bound == 1.0
    (picture,) = shown.pictures()
    lines = picture.figure.axes[0].get_lines()
    assert {x.get_label(): x.get_xydata().tolist() for x in lines} == {
        "a": [[0, 2], [1, 4], [2, 8]], "d": [[0, 5], [1, 10]], "b": [[0, 10]]
    }  # fmt: skip


# Table 16: layers by three measures of sensitivity.


def test_layers_stand_by_damage_with_their_other_places(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(damage: int, gain: int, trace: int | None) -> dict[str, int | None]:
        return {
            "ablation": damage, "random-direction gain": gain, "Hessian trace": trace, "ablation per channel": 1
        }  # fmt: skip

    def layer(changed: float, row: float) -> dict[str, Any]:
        return {"changed": changed, "per_channel": {"changed": row, "by_prompt": [row] * 5}}

    result = {
        "model": "m",
        "measure": "changed",
        "table": {
            "places": {"c.a.weight": place(2, 1, None), "c.b.weight": place(1, 2, 3)},
            "spearman": {"random-direction gain": 0.0},
        },
        "layers": {
            "c.a.weight": layer(0.05, 0.2),
            "c.b.weight": layer(0.125, 0.5),
            "c.d.weight": layer(0.0, 0.1),
        },
        "exposed": ["c.b.weight"],
    }
    # A correlation of fewer layers has no interval that could exclude a half.
    monkeypatch.setattr(sensitivity, "MIN_LAYERS", 3)
    assert len(sensitivity.show([result]).claims) == 1
    monkeypatch.setattr(sensitivity, "MIN_LAYERS", 2)
    shown = sensitivity.show([result])
    assert shown.tables[0].rows == (
        ("m", "b", "12.50 %", "2", "3", "1"),
        ("m", "a", "5.00 %", "1", None, "1"),
    )
    ranking, worst = shown.claims
    # Fisher: tanh(+-1.96 sqrt(1.06)), as for four layers or fewer.
    assert ranking.found == "Spearman correlation +0.00 [-0.97, +0.97]"
    assert (ranking.bound, ranking.below) == (0.5, True)
    assert (worst.holds, worst.found) == (True, "+30.0 points beyond a [+30.0, +30.0]")
    del result["table"]["spearman"]["random-direction gain"]
    result["table"]["spearman"]["random-direction gain"] = None
    assert len(sensitivity.show([result]).claims) == 1


def test_the_interval_of_a_correlation_is_fishers() -> None:
    interval = sensitivity._fisher(0.5, 28)
    half = 1.96 * math.sqrt(1.06 / 25)
    assert (interval.low, interval.high) == pytest.approx(
        (math.tanh(math.atanh(0.5) - half), math.tanh(math.atanh(0.5) + half))
    )
    assert (interval.estimate, interval.n, interval.level) == (0.5, 28, 0.95)
    assert sensitivity._fisher(1.0, 9).low < 1


# Section 6.2: sizes, and time of collection.


def test_the_size_of_huginn_is_that_of_its_shapes() -> None:
    assert sum(rows * columns * count for rows, columns, count in HUGINN) == 1_637_222_400
    assert round(huginn_bytes(False) / 1e9, 3) == 0.845
    assert round(huginn_bytes(True) / 1e9, 3) == 0.861


def test_bytes_and_seconds_are_shown_with_their_ratios() -> None:
    def found(first: float) -> dict[str, object]:
        return {"model": "m", "dense": 4_000_000, "bytes": 1_600_000, "seconds": {"first": first, "all": 3.0}}

    paper, padded, model, quick = size.show([found(2.0), found(0.0)]).tables[0].rows
    assert paper[1:] == ("3.274 GB", "0.845 GB", "3.88", None, None, None)
    assert padded[1:4] == ("3.274 GB", "0.861 GB", "3.80")
    assert model == ("m", "4.000 MB", "1.600 MB", "2.50", "2.00", "3.00", "1.50")
    assert quick[4:] == ("0.00", "3.00", None)


# Figure 5 and Table 22: eigenvalues by threshold, prompts and steps.


def test_counts_are_shown_by_threshold_and_spectra_drawn() -> None:
    def described(rank: int) -> dict[str, Any]:
        ranks = {f"{tau:g}": 1000 * rank + i for i, tau in enumerate(spectra.THRESHOLDS)}
        return {
            "ranks": ranks, "rank": rank, "effective_rank": 2.6, "stable_rank": 1.25,
            "curve": {"index": [1, 3], "value": [0.5, 0.0]},
        }  # fmt: skip

    kinds = {kind: described(i) for i, kind in enumerate((spectra.FEW, spectra.MANY, spectra.STEPS), 1)}
    layers = {"c.a.weight": kinds, "c.b.weight": kinds}
    found: dict[str, Any] = {"model": "m", "layers": layers, "more": [[4, 2], [6, 3], [8, 4], [2, 1], [9, 6]]}
    shown = spectra.show([found])
    table = shown.tables[0]
    assert [row[1:4] for row in table.rows[:3]] == [
        ("c.a", spectra.FEW, "1,000"), ("c.a", spectra.MANY, "2,000"), ("c.a", spectra.STEPS, "3,000")
    ]  # fmt: skip
    assert table.rows[4][3:] == (*(f"2,{i:03d}" for i in range(len(spectra.THRESHOLDS))), "3", "1.2")
    (claim,) = shown.claims
    assert claim.interval.estimate == pytest.approx((2**4 * 1.5) ** 0.2)
    assert (claim.holds, claim.interval.n) == (True, 5)
    assert spectra.show([found | {"more": []}]).claims == []
    (picture,) = shown.pictures()
    first, second = picture.figure.axes
    assert (first.get_title(), second.get_title(), first.get_xscale()) == ("m: c.a", "m: c.b", "log")
    assert first.get_lines()[0].get_xydata().tolist() == [[1, 0.5], [3, 1e-12]]
