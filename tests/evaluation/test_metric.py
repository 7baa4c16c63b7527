"""A score with its interval and its change, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loopq.evaluation.metric import Metric


def test_changes_are_paired_over_items() -> None:
    before, after = (Metric("acc", np.array([1.0] * a + [0.0] * (40 - a))) for a in (30, 20))
    change, p = after.change(before)
    assert change.estimate == -0.25
    assert change.low < -0.25 < change.high < 0
    # Ten items changed, all one way: 2 / 2^10.
    assert p == pytest.approx(2 / 1024)
    i = before.interval()
    assert (round(i.low, 3), i.estimate, round(i.high, 3)) == (0.598, 0.75, 0.858)
    words = np.array([10.0, 20.0, 30.0])
    one, two = (Metric("word_perplexity", words * v, words) for v in (2.0, 2.5))
    ratio, none = two.change(one)
    assert (ratio.estimate, none) == (pytest.approx(math.exp(0.5)), None)
    # Every word lost the same: the ratio does not vary although the texts do.
    assert ratio.low == pytest.approx(ratio.high)
    assert one.interval().estimate == one.value == pytest.approx(math.exp(2.0))


def test_plain_data_has_the_change_where_there_is_one_before() -> None:
    before, after = (Metric("answer", np.array(values)) for values in ([1.0, 1.0, 0.0], [1.0, 0.0, 0.0]))
    first, second = before.to_json(None), after.to_json(before)
    assert (first["change"], first["p_value"]) == (None, None)
    assert (first["values"], first["sizes"], first["interval"]["estimate"]) == ([1, 1, 0], None, before.value)
    assert second["change"]["estimate"] == pytest.approx(-1 / 3)
    assert second["p_value"] == 1.0
    words = Metric("word_perplexity", np.array([2.0, 4.0]), np.array([1.0, 2.0]))
    assert (words.to_json(words)["sizes"], words.to_json(words)["p_value"]) == ([1, 2], None)
