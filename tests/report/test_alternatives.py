"""Every set of weights, KL against bytes, the prompts that changed most."""

from __future__ import annotations

import re

import pytest

from loopq.report.alternatives import _ticks, alternatives, changed_prompts, facts
from tests.report.conftest import measured, summary


def test_every_set_of_weights_has_a_row_and_a_point():
    text = alternatives(measured(summary("Q <3>", 0.02, 1000), summary("Q4", 0.005, 2000)))
    assert re.search(r"<th scope=row>Q &lt;3&gt;</th><td class=number[^>]*>0.02000</td>", text)
    assert "<td class=number>0.01000 to 0.04000</td>" in text
    # The longest bar is the largest KL.
    assert re.findall(r"width:([\d.]+)%", text) == ["0.0", "100.0", "25.0"]
    assert text.count("<circle") == 2


def test_one_point_is_no_plot():
    for found in ([summary("Q", 0.02)], [summary("Q", 0.02), summary("unknown", 0.1, None)]):
        assert "<circle" not in alternatives(measured(*found))


def test_names_of_points_that_are_close_do_not_cover_each_other():
    text = alternatives(measured(*(summary(f"Q{i}", 0.02 + 1e-5 * i) for i in range(4))))
    heights = [float(y) for y in re.findall(r'y="([\d.]+)" class="name"', text)]
    assert min(abs(a - b) for i, a in enumerate(heights) for b in heights[:i]) >= 16


@pytest.mark.parametrize(
    ("most", "last", "n"),
    [(0.0519, 0.06, 4), (1.0, 1.0, 6), (9.9, 10, 6), (415_230, 500_000, 6), (2e-9, 2e-9, 5)],
)
def test_ticks_are_round_and_reach_the_largest_value(most, last, n):
    ticks = _ticks(most)
    assert ticks[0] == 0
    assert ticks[-1] == pytest.approx(last)
    assert len(ticks) == n


def test_facts_are_of_one_set_of_weights():
    text = facts(measured(summary("Q", 0.02)))
    assert "<dd>0.02000</dd>" in text
    assert "25 % of 4.00 kB before" in text
    assert facts(measured(summary("Q", 0.02), summary("Q2", 0.02))) == ""


def test_hidden_states_have_no_kl():
    hidden = {"output": "hidden"}
    found = measured(summary("Q", 0.02, **hidden), summary("Q2", 0.03, **hidden))
    found["weights"][0] |= hidden
    text = alternatives(found) + facts(measured(summary("Q", 0.02)) | {"weights": found["weights"][:2]})
    assert "KL" not in text
    assert "squared relative error" in text
    assert "cosine" in text


def test_the_prompt_with_the_largest_kl_comes_first_on_one_line_and_in_part():
    text = changed_prompts(measured(summary("Q4", 0.005)))
    assert text.index("the second &amp; more") < text.index("xxx") < text.index("the first")
    assert "x" * 161 not in text
    assert text.count('class="bar"') == 3


def test_prompts_of_several_sets_of_weights_stand_beside_each_other():
    other = summary("other", 1.0, kl_by_prompt=[0.0, 0.0, 3.0])
    text = changed_prompts(measured(summary("Q4", 0.005), other))
    assert "<th scope=col class=number>Q4</th><th scope=col class=number>other</th>" in text
    assert text.index("xxx") < text.index("the second")
    assert 'class="bar"' not in text


def test_weights_that_overflow_are_shown_as_such():
    found = measured(summary("broken", float("nan"), kl_95=None), summary("Q", 0.1), summary("Q2", 0.2))
    text = alternatives(found) + changed_prompts(found)
    assert "nan</td>" in text
    assert "nan%" not in text
    assert text.count("<circle") == 2
