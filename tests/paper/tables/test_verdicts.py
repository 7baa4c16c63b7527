"""What decides a claim: an interval, a margin, items, a resolution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loopq.paper.compared import ALL, FULL, ONE, RTN
from loopq.paper.tables import awq, benchmarks, closed_loop, horizon
from loopq.paper.tables.bits_per_byte import show
from loopq.paper.tables.horizon import horizons
from loopq.paper.tables.step_window import late_step_wins
from tests.support.paper import found

# Table 13: calibration step of GPTQ and AWQ.


@pytest.mark.parametrize(("gptq", "holds"), [(2.0, True), (1.0, False), (1.3, None)])
def test_the_steps_of_awq_and_gptq_are_compared_by_an_interval(gptq: float, holds: bool | None) -> None:
    base = np.linspace(0.5, 2.0, 40)
    wave = 1.3 + 0.9 * np.cos(np.arange(40))
    kl = {name: base * (wave if name == awq.AWQ[0] else 1.0) for name in awq.AWQ}
    kl |= {ONE: gptq * base, awq.LAST: base, ALL: base, awq.ASYMMETRIC: base}
    claim = awq.claims(found(**{name: (values.tolist(), [1.0] * 40) for name, values in kl.items()}))[0]
    assert claim is not None
    assert claim.holds is holds, claim.found
    small = found(**{name: ((1e-5 * values).tolist(), [1.0] * 40) for name, values in kl.items()})
    assert awq.claims(small)[0].holds is None  # type: ignore[union-attr]


# Appendix J: Hessians of the quantized rollout.


@pytest.mark.parametrize(
    ("factor", "noise", "holds"),
    [(1.01, 0.01, True), (1.01, 0.9, None), (1.5, 0.01, False), (0.5, 0.01, False)],
)
def test_closed_loop_is_alike_only_within_the_margin(factor: float, noise: float, holds: bool | None) -> None:
    base = np.linspace(0.5, 2.0, 40)
    spread = factor * (1 + noise * np.cos(np.arange(40)))
    kl = {RTN: 3 * base, ALL: base, closed_loop.CLOSED: base * spread}
    given = found(**{name: (values.tolist(), [1.0] * 40) for name, values in kl.items()})
    claim = closed_loop.claims(given)[0]
    assert claim is not None
    assert claim.holds is holds, claim.found


# Table 11: bits per byte of text.


def test_a_loop_meets_models_of_one_step_in_as_many_bytes() -> None:
    def model(name: str, n_steps: int, nll: float, n_bytes: int = 100, text: str = "t") -> dict[str, Any]:
        row = {"kl": [0.1] * 6, "nll": [nll] * 6, "n_bytes": n_bytes}
        head = {"model": name, "n_steps": n_steps, "bytes_per_token": 1.0, "text": text}
        return head | {"variants": dict.fromkeys((FULL, RTN, ONE, ALL), row)}

    others = [model("c", 1, 1.5), model("big", 1, 0.5, 106), model("elsewhere", 1, 0.5, text="u")]
    claims = [c for c in show([model("loop", 8, 1.0), *others]).claims if "in as many bytes" in c.text]
    assert [(c.model, c.holds) for c in claims] == [("loop", True)]
    assert "+0.7213 bits per byte" in claims[0].found
    (near,) = [
        c for c in show([model("loop", 8, 1.5 - 5e-5), others[0]]).claims if "of c, in as many" in c.text
    ]
    assert (near.holds, near.undecided) == (None, "they differ by less than 0.0001")
    worse = [model("loop", 8, 2.0), others[0]]
    assert [c.holds for c in show(worse).claims if "of c, in as many" in c.text] == [False]


# The table of benchmarks.


@pytest.mark.parametrize(("articles", "better", "holds"), [(6, 1.0, True), (2, 1.0, None), (6, 1e-5, None)])
def test_a_perplexity_is_decided_by_articles_and_resolution(
    articles: int, better: float, holds: bool | None
) -> None:
    def row(nll: float) -> dict[str, Any]:
        return {"wikitext": {"values": [nll * 100] * articles, "sizes": [100] * articles}}

    result = {
        "model": "m",
        "variants": {FULL: row(3.0), RTN: row(4.0), ONE: row(4.0), ALL: row(4.0 - better)},
    }
    assert [claim.holds for claim in benchmarks.show([result]).claims] == [holds] * 2
    # A word perplexity of e^7 in full precision is no model of words.
    result["variants"][FULL] = row(7.0)
    assert benchmarks.show([result]).claims == []


@pytest.mark.parametrize(
    ("n", "right", "verdicts"), [(500, 0.9, ["holds"] * 2), (500, 0.04, []), (499, 0.9, None)]
)
def test_a_score_needs_items_and_a_model_that_can_do_the_task(
    n: int, right: float, verdicts: list[str] | None
) -> None:
    def row(share: float) -> dict[str, Any]:
        hits = round(share * n)
        return {"lambada": {"values": [1.0] * hits + [0.0] * (n - hits), "sizes": None}}

    found = {"model": "m", "variants": {FULL: row(right), RTN: row(0.1), ONE: row(0.2), ALL: row(0.6)}}
    claims = benchmarks.show([found]).claims
    if verdicts is None:
        assert [c.asked for c in claims] == [False] * 2
    else:
        assert [c.verdict for c in claims] == verdicts


# Figure 3, Tables 6 and 7: calibration horizon.


@pytest.mark.parametrize(
    ("depth", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (32, [1, 2, 4, 8, 16, 32])]
)
def test_horizons_double_up_to_the_depth(depth: int, expected: list[int]) -> None:
    assert horizons(depth) == expected


def test_ranks_and_errors_are_shown_by_the_steps_summed() -> None:
    right, wrong = [1.0] * 8, [0.0] * 8

    def variant(kl: float, answered: list[float]) -> dict[str, Any]:
        by_prompt = [kl * k for k in (1.0, 1.2, 0.8, 1.0, 1.0, 1.1, 0.9, 1.0)]
        return {"kl": by_prompt, "agreement": [0.5] * 8, "nll": None, "answered": answered, "n_bytes": 1000}

    result = {
        "model": "m", "output": "logits", "bytes_per_token": None, "layer": "a", "dim": 40, "horizons": [1, 2, 3],
        "ranks": [2, 3, 10], "rank_last_step": 4, "gains": [2.0, 4.0, 8.0, 4.0, 4.0],
        "variants": {
            RTN: variant(0.4, wrong), "GPTQ, 1 step": variant(0.2, wrong), "GPTQ, 2 steps": variant(0.3, wrong),
            "GPTQ, 3 steps": variant(0.1, right),
        },
    }  # fmt: skip
    shown = horizon.show([result])
    assert shown.tables[0].rows == (
        ("m", "a", "1", "2", "5.00 %", "0.2"),
        ("m", "a", "2", "3", "7.50 %", "0.3"),
        ("m", "a", "3", "10", "25.00 %", "0.1"),
    )
    grown, first, rounding, two, answers = shown.claims
    # The geometric mean of 2, 4, 8, 4 and 4.
    assert grown.found.startswith("4.00 [")
    assert [c.found[:14] for c in (first, rounding, two)] == [
        "KL ratio 0.500",
        "KL ratio 0.250",
        "KL ratio 1.500",
    ]
    assert [c.holds for c in (first, rounding, two)] == [True, True, False]
    # Eight answers decide nothing.
    assert (answers.p, answers.asked) == (pytest.approx(2 * 0.5**8), False)
    rank, error = shown.pictures()
    assert rank.figure.axes[0].get_lines()[0].get_xydata().tolist() == [[1, 2], [2, 3], [3, 10]]
    lines = {x.get_label(): x.get_xydata() for x in error.figure.axes[0].get_lines()}
    np.testing.assert_allclose(lines["GPTQ"], [[1, 0.2], [2, 0.3], [3, 0.1]])
    np.testing.assert_allclose(lines[RTN], [[1, 0.4], [2, 0.4], [3, 0.4]])


# Table 23: calibration without step 0.


def test_layers_with_the_smaller_late_loss_are_counted() -> None:
    h = {"a": np.eye(4), "b": np.eye(4)}
    small, big = np.full((2, 4), 0.1, np.float32), np.full((2, 4), 0.5, np.float32)
    assert late_step_wins({"a": small, "b": big}, {"a": big, "b": small}, h) == (1, 2)
    assert late_step_wins({"a": small}, {"a": small}, h) == (0, 1)
