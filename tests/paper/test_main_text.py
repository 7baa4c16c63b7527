"""The main table in words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopq.paper import main_text
from loopq.paper.compared import closer
from loopq.paper.main_text import ALL, ONE, RTN
from tests.support.paper import main_table, save


def variants(rtn: float, one: float, steps: float, noise: float = 0.1) -> dict[str, dict[str, Any]]:
    base = np.linspace(0.5, 1.5, 24)
    spread: dict[str, Any] = {ALL: np.cos(np.arange(24)), ONE: np.sin(np.arange(24)), RTN: 0.0}
    kl = {RTN: rtn, ONE: one, ALL: steps}
    return {n: {"kl": [(k * base * (1 + noise * spread[n])).tolist()]} for n, k in kl.items()}


@pytest.mark.parametrize(
    ("given", "holds"),
    [
        (variants(1, 1.5, 0.5), [True, True, False]),
        (variants(1, 0.5, 0.49), [True, None, True]),
        (variants(1, 1, 1.3), [False, False, None]),
        (variants(1, 0.4, 0.5), [True, False, True]),
        (variants(1e-5, 3e-5, 2e-5), [None, None, None]),
    ],
)
def test_each_pair_of_the_three_is_compared(given: Any, holds: list[bool | None]) -> None:
    claims = main_text.comparisons("m", given)
    pairs = (f"{ALL} / {RTN}", f"{ALL} / {ONE}", f"{ONE} / {RTN}")
    assert [claims[pair].holds for pair in pairs] == holds
    # Table 6 compares the same numbers, and so has the same verdict.
    one, steps = (given[name]["kl"][0] for name in (ONE, ALL))
    assert claims[f"{ALL} / {ONE}"].holds is closer("m", "", steps, one, "").holds


def grid(bits: int, group: int, **kl: list[list[float]]) -> list[dict[str, Any]]:
    """Variants of one grid: agreement is 1 - KL, and the loss per token 2 + KL."""
    return [
        {
            "variant": name, "bits": bits, "group_size": group, "n_bytes": 100 * bits, "kl": by_seed,
            "agreement": [[1 - k for k in row] for row in by_seed], "nll": [[2 + k for k in row] for row in by_seed],
        }
        for name, by_seed in kl.items()
    ]  # fmt: skip


def measured(name: str = "m", factor: float = 1.0, **more: Any) -> dict[str, Any]:
    """Two calibration seeds, three prompts. At four bits N steps win; at three bits they lose."""
    flat = {RTN: [0.4] * 3, ONE: [0.2] * 3, ALL: [0.1] * 3}
    lost = {RTN: [0.2] * 3, ONE: [0.1] * 3, ALL: [0.4] * 3}
    ranks = [
        {"layer": n, "class": c, "n_inputs": 8, "first": f, "last": f + 2, "all": f + 4, "gain": g}
        for n, c, f, g in (("a0", "attn", 1, 2.0), ("a1", "attn", 3, 4.0), ("f0", "mlp", 5, None))
    ]
    return {
        "model": name, "system": "s", "n_steps": 3, "output": "logits", "task": "text", "looped": True,
        "ranks": {"threshold": 0.01, "bottleneck": "a1", "layers": ranks}, "settings": {}, "seconds": 1.0,
        "bytes_per_token": 4.0, "full_precision": [2.0] * 3, "states": None,
        "variants": grid(4, 128, **{n: [v, [factor * x for x in v]] for n, v in flat.items()})
        + grid(3, 32, **{n: [v, v] for n, v in lost.items()}),
    } | more  # fmt: skip


STATES = {
    "probe": {"mask_share": 0.25, "mask_id": 7, "n_positions": 12_000},
    "full precision": {
        "error": [0.0] * 3, "cosine": [1.0] * 3, "masked": [10, 30], "hits": [5, 15], "same": [10, 30]
    },
    ALL: {
        "error": [0.01, 0.02, 0.03], "cosine": [0.999, 0.998, 0.997], "masked": [10, 30], "hits": [4, 12],
        "same": [9, 27],
    },
}  # fmt: skip


def test_variants_are_compared_with_rounding_and_full_precision() -> None:
    four, three = main_text.summarize_model(measured(factor=1.5))["grids"]
    steps = four["variants"][ALL]
    assert steps["n_bytes"] == 400
    # Means of 0.1 and 0.15 over seeds, and of 0.4 and 0.6.
    assert steps["kl"] == pytest.approx({"estimate": 0.125, "low": 0.125, "high": 0.125})
    assert steps["agreement"]["estimate"] == pytest.approx(0.875)
    assert steps["gap_closed"] == pytest.approx({"estimate": 0.75, "low": 0.75, "high": 0.75})
    # Each seed's KL against the mean of rounding: 1 - 0.1 / 0.5 and 1 - 0.15 / 0.5.
    over = steps["gap_closed_over_seeds"]
    assert (over["estimate"], over["high"]) == pytest.approx((0.75, 0.75 + 12.7062 * 0.05), rel=1e-4)
    # Four bytes a token: 2.125 nats are 2.125 / (4 ln 2) bits a byte, 0.125 above full precision's.
    bit = 1 / (4 * np.log(2))
    assert steps["bits_per_byte"]["estimate"] == pytest.approx(2.125 * bit)
    assert steps["bits_lost"]["estimate"] == pytest.approx(0.125 * bit)
    assert (four["bits"], four["group_size"], four["holds"]) == (4, 128, None)
    assert (three["bits"], three["group_size"], three["holds"]) == (3, 32, None)
    assert not four["ratios"] or set(four["ratios"]) <= {
        "N steps / RTN",
        "N steps / one step",
        "one step / RTN",
    }


def test_the_ends_of_the_closed_gap_are_turned_round() -> None:
    uneven = {RTN: [[0.2, 0.6, 0.4]], ONE: [[0.1, 0.2, 0.4]], ALL: [[0.1, 0.1, 0.2]]}
    given = measured(variants=[*grid(4, 128, **uneven), *grid(3, 32, **uneven)])
    variants_ = main_text.summarize_model(given)["grids"][0]["variants"]
    gap = variants_[ALL]["gap_closed"]
    assert gap["low"] < gap["estimate"] == pytest.approx(1 - 0.4 / 1.2)
    assert gap["high"] > gap["estimate"]
    assert variants_[ALL]["gap_closed_over_seeds"] is None
    assert variants_[RTN]["gap_closed"]["estimate"] == 0


def test_hidden_states_have_no_bits_per_byte() -> None:
    summary = main_text.summarize_model(measured(full_precision=None, bytes_per_token=None, output="hidden"))
    assert "bits_per_byte" not in summary
    assert set(summary["grids"][0]["variants"][RTN]) == {
        "n_bytes", "kl", "agreement", "gap_closed", "gap_closed_over_seeds"
    }  # fmt: skip
    first, rtn, *_ = main_text.tables({"models": [summary], "training_seeds": []})[0].rows
    assert first == ("m", "3", "full precision", *[None] * 6)
    assert rtn[5:8] == (None, None, None)
    (note,) = re.findall(
        r"\* smallest KL\.(.*)", main_text.tables({"models": [summary], "training_seeds": []})[0].text
    )
    assert note.startswith(" m has no logits")


def test_seeds_of_a_kind_are_told_by_the_end_of_their_names() -> None:
    names = ("a", "a_seed1", "a_seed12", "b", "b_seedling")
    record = main_text.summarize(
        [measured(n, factor) for n, factor in zip(names, (1, 1, 4, 1, 1), strict=True)]
    )
    rows = record["training_seeds"]
    assert [(r["kind"], r["bits"], r["group_size"], r["variant"]) for r in rows] == [
        ("a", 4, 128, ONE), ("a", 4, 128, ALL), ("a", 3, 32, ONE), ("a", 3, 32, ALL)
    ]  # fmt: skip
    assert rows[1]["models"] == ["a", "a_seed1", "a_seed12"]
    assert rows[1]["by_seed"] == pytest.approx([0.75] * 3)
    assert rows[3]["by_seed"] == pytest.approx([-1.0] * 3)
    assert rows[3]["gap_closed"] == pytest.approx({"estimate": -1.0, "low": -1.0, "high": -1.0})
    (seeds,) = [t for t in main_text.tables(record) if t.title == "Over training seeds"]
    assert seeds.rows[1] == (
        "a", "INT4 g128", ALL, "3", "0.75 [0.75, 0.75]", "0.75, 0.75, 0.75", "0 of 3"
    )  # fmt: skip


def test_the_table_of_a_grid_marks_the_smallest_divergence() -> None:
    summary = main_text.summarize_model(measured())
    four, three = main_text.tables({"models": [summary], "training_seeds": []})[:2]
    assert (four.title, three.title) == ("INT4, group size 128", "INT3, group size 32")
    bit = 1 / (4 * np.log(2))
    full = f"{2 * bit:.3f}"
    assert four.rows[0] == ("m", "3", "full precision", None, None, full, None, None, None)
    assert four.rows[3] == (
        "", "", "N steps *", "0.1 [0.1, 0.1]", "0.900 [0.900, 0.900]", f"{2.1 * bit:.3f}",
        " ".join((f"{0.1 * bit:.3f}", f"[{0.1 * bit:.3f}, {0.1 * bit:.3f}]")), "0.75 [0.75, 0.75]", "0.75 [0.75, 0.75]",
    )  # fmt: skip
    assert [row[2] for row in four.rows[1:]] == ["RTN", "one step", "N steps *"]
    assert [row[2] for row in three.rows[1:]] == ["RTN", "one step *", "N steps"]
    assert four.rows[1][7] is None
    assert "instead of text" not in four.text
    speech = main_text.summarize_model(measured(task="speech"))
    assert (
        " m is measured on speech instead of text."
        in main_text.tables({"models": [speech], "training_seeds": []})[0].text
    )


def test_ranks_are_means_over_the_layers_of_a_class() -> None:
    summary = main_text.summarize_model(measured())
    (table,) = [
        t for t in main_text.tables({"models": [summary], "training_seeds": []}) if t.title == "Rank survey"
    ]
    assert table.rows == (
        ("m", "attn *", "2", "8", "2", "4", "6", "3.0 (max 4.0)"), ("", "mlp", "1", "8", "5", "7", "9", None)
    )  # fmt: skip
    assert "above 0.01 of the largest" in table.text


def test_states_are_shown_at_powers_of_two_and_the_last_step() -> None:
    summary = main_text.summarize_model(measured(states=STATES))
    states = summary["states"]["weights"]
    assert states[ALL]["n_masked"] == 40
    assert states[ALL]["hits"]["estimate"] == pytest.approx(16 / 40)
    assert states[ALL]["same"]["estimate"] == pytest.approx(0.9)
    table = main_text.tables({"models": [summary], "training_seeds": []})[-1]
    assert table.header == (
        "weights", "error, step 1", "error, step 2", "error, step 3", "cosine, step 1", "cosine, step 3",
        "probe correct %", "probe unchanged %",
    )  # fmt: skip
    assert table.rows[1] == (
        ALL,
        "1.00",
        "2.00",
        "3.00",
        "0.99900",
        "0.99700",
        "40.0 [40.0, 40.0]",
        "90.0 [90.0, 90.0]",
    )
    for words in ("25 % of the phonemes", "(id 7)", "12,000 positions", "at 40 positions"):
        assert words in table.text
    assert main_text.summarize_model(measured())["states"] is None


def test_the_headline_counts_the_models_where_both_hold() -> None:
    def model(name: str, *holds: bool | None) -> dict[str, Any]:
        return {"model": name, "grids": [{"holds": h} for h in holds]}

    lines = main_text.headline({"models": [model("a", True, False), model("b", None, False)]})
    assert [line.rpartition(" on ")[2] for line in lines if line.startswith("INT")] == [
        "1 of 2 models.", "0 of 2 models."
    ]  # fmt: skip
    assert [line.partition(":")[0] for line in lines if line.startswith("INT")] == ["INT4 g128", "INT3 g32"]


def test_ratios_of_each_pair_are_shown_beside_the_verdict() -> None:
    def row(seed: list[float]) -> list[list[float]]:
        return [[k * base for base in (0.5, 0.8, 1.0, 1.2, 1.5, 1.0)] for k in seed]

    rows = {RTN: row([0.4]), ONE: row([0.2]), ALL: row([0.1])}
    model = main_text.summarize_model(
        measured(full_precision=[2.0] * 6, variants=[*grid(4, 128, **rows), *grid(3, 32, **rows)])
    )
    assert model["grids"][0]["holds"] is True
    (table,) = [
        t for t in main_text.tables({"models": [model], "training_seeds": []}) if t.header[1] == "grid"
    ]
    assert table.rows[0][:5] == (
        "m",
        "INT4 g128",
        "0.25 [0.25, 0.25]",
        "0.50 [0.50, 0.50]",
        "0.50 [0.50, 0.50]",
    )
    assert table.rows[0][5] == "holds"
    assert table.rows[1][1] == "INT3 g32"


@pytest.mark.slow
def test_training_seeds_are_put_together(tmp_path: Path) -> None:
    names = [save(tmp_path / n, "ouro", n_layers=1, total_ut_steps=2) for n in ("a", "a_seed1", "b")]
    record = main_text.summarize([main_table(n) for n in names])
    assert {r["kind"] for r in record["training_seeds"]} == {"a"}
    for row in record["training_seeds"]:
        assert row["models"] == ["a", "a_seed1"]
        assert row["gap_closed"]["estimate"] == pytest.approx(np.mean(row["by_seed"]))
