"""Claims are judged by paired intervals."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.paper.compared import ALL, ONE, RTN, answers, below, closed, closer, grown, most
from tests.support.paper import found


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
    better = answers(given, "a", "b")
    assert better is not None
    # 30 against 10 discordant answers: p = 0.0022 in any table of the binomial distribution.
    assert better.holds is True
    assert "p = 0.0022" in better.found
    assert "+50.0 points" in better.found
    same = answers(given, "a", "c")
    assert same is not None
    assert same.holds is None


def test_gap_closed_is_the_share_of_the_kl_of_rounding() -> None:
    given = {"variants": {RTN: {"kl": [2.0, 4.0]}, ALL: {"kl": [1.0, 0.5]}, ONE: {"kl": [4.0, 5.0]}}}
    assert closed(given, ALL) == pytest.approx(0.75)
    assert closed(given, ONE) == pytest.approx(-0.5)


def test_small_differences_and_few_units_decide_nothing() -> None:
    worse = np.linspace(1e-5, 2e-5, 40)
    assert closer("m", "", worse / 10, worse).holds is None
    assert closer("m", "", 100 * worse, 1000 * worse).holds is True
    assert closer("m", "", [0.1] * 4, [0.2] * 4).holds is None
    assert closer("m", "", [0.1] * 5, [0.2] * 5).holds is True
    three, one = [(True,) * 3, (True,)]
    assert answers(found(a=([1.0] * 9, [*three, *[0] * 6]), b=([1.0] * 9, [0] * 9)), "a", "b").holds is None
    assert most("m", "", [*one * 4]).holds is None
    assert most("m", "", [*one * 9, False]).holds is True
    assert most("m", "", [*one * 5, False, False, False]).holds is None
    assert most("m", "", [False] * 9).holds is False
    assert grown("m", "", [3, 4, 5, 6, 7], [1, 1, 2, 2, 2], bound=2.0).holds is True
    assert grown("m", "", [43], [1]).holds is None
