"""Every set of weights, KL against bytes."""

from __future__ import annotations

import re

import pytest

from loopq.analysis.report.alternatives import _ticks, alternatives, comparison, facts
from tests.analysis.report.conftest import measured, summary


def test_every_set_of_weights_has_a_row_and_a_point():
    text = alternatives(measured(summary("Q <3>", 0.02, 1000), summary("Q4", 0.005, 2000)))
    assert re.search(r"<th scope=row>Q &lt;3&gt;</th><td class=number[^>]*>0.02000</td>", text)
    assert "<td class=number>0.01000 to 0.04000</td>" in text
    # The longest bar is the largest KL.
    assert re.findall(r"width:([\d.]+)%", text) == ["0.0", "100.0", "25.0"]
    assert text.count("<circle") == 2


def test_one_point_is_no_plot():
    for summaries in ([summary("Q", 0.02)], [summary("Q", 0.02), summary("unknown", 0.1, None)]):
        assert "<circle" not in alternatives(measured(*summaries))


def test_facts_are_of_one_set_of_weights():
    text = facts(measured(summary("Q", 0.02)))
    assert "<dd>0.02000</dd>" in text
    assert "25 % of 4.00 kB before" in text
    assert facts(measured(summary("Q", 0.02), summary("Q2", 0.02))) == ""


def test_hidden_states_have_no_kl():
    hidden = {"output": "hidden"}
    data = measured(summary("Q", 0.02, **hidden), summary("Q2", 0.03, **hidden))
    data["weights"][0] |= hidden
    text = alternatives(data) + facts(measured(summary("Q", 0.02)) | {"weights": data["weights"][:2]})
    assert "KL" not in text
    assert "squared relative error" in text
    assert "cosine" in text


def test_weights_that_overflow_are_shown_as_such():
    data = measured(summary("broken", float("nan"), kl_95=None), summary("Q", 0.1), summary("Q2", 0.2))
    text = alternatives(data)
    assert "nan</td>" in text
    assert "nan%" not in text
    assert text.count("<circle") == 2


def points(text):
    """Places of the points, from the lowest KL to the highest."""
    return [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', text)]


def test_points_stand_at_bytes_and_divergence():
    text = alternatives(
        measured(summary("a", 0.5, 500_000), summary("b", 1.0, 1_000_000), summary("c", 0.25, 0))
    )
    # The third has no bytes. Axes from 0 to 1 and from 0 to 1 MB, which is 0.74 of 418 from 62.
    assert points(text) == [(216.7, 254 - 0.5 * 228), (371.3, 26.0)]
    for tick in ("0", "0.2", "1", "200 kB", "1 MB"):
        assert f">{tick}</text>" in text
    assert 'aria-label="a: 500.00 kB, 0.50000; b: 1.00 MB, 1.00000"' in text
    assert "<h3>KL to" not in text
    assert "<h3>KL against bytes</h3>" in text


def test_a_name_moves_up_only_beside_another():
    def heights(*given):
        text = alternatives(measured(*given))
        names = [float(y) for y in re.findall(r'y="([\d.]+)" class="name"', text)]
        return [y + 4 - name for (_, y), name in zip(points(text), names, strict=True)]

    assert heights(summary("a", 0.5, 100), summary("b", 0.5, 1000)) == [0, 0]
    assert heights(summary("a", 0.5, 999), summary("b", 0.5, 1000)) == [0, 16]
    # 16 below the next name is enough: 228 of the height are 1 nat. 110 of the width of 309 are 356 of 1,000 bytes.
    assert heights(summary("a", 1 - 17 / 228, 1000), summary("b", 1.0, 1000)) == [0, 0]
    assert heights(summary("a", 1 - 12 / 228, 1000), summary("b", 1.0, 1000)) == [0, pytest.approx(4)]
    assert heights(summary("a", 1.0, 630), summary("b", 1.0, 1000)) == [0, 0]


def test_facts_compare_with_full_precision():
    text = facts(measured(summary("Q", 0.02, 1000)))
    assert "<dt>KL to full precision in nats per token, 95 % interval 0.01000 to 0.04000</dt>" in text
    assert "<dd>90.00 %</dd>" in text
    assert "<dt>perplexity, 5.0000 before</dt><dd>5.0000</dd>" in text
    assert "interval" not in facts(measured(summary("Q", 0.02, kl_95=None)))
    assert "all weights" not in facts(measured(summary("Q", 0.02, None)))


def test_missing_numbers_are_dashes():
    rows = [summary("one", 0.5), summary("other", 1.0, None, kl_95=None, bits_per_byte=None)]
    first, second = comparison("t", rows).split("<tbody>")[1].split("</tr>")[:2]
    assert "width:50.0%" in first
    assert ">1.00 kB</td>" in first
    assert second.count(">-</td>") == 3
    plain = comparison("t", [summary("a", 0.5, kl_95=None)])
    assert "interval" not in plain


@pytest.mark.parametrize(
    ("most", "ticks"),
    [
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (2.4, [0, 0.5, 1, 1.5, 2, 2.5]),
        (3.0, [0, 1, 2, 3]),
        (70, [0, 20, 40, 60, 80]),
        (2e-9, [0, 5e-10, 1e-9, 1.5e-9, 2e-9]),
        (0.05, [0, 0.01, 0.02, 0.03, 0.04, 0.05]),
        (1000, [0, 200, 400, 600, 800, 1000]),
    ],
)
def test_ticks_are_round_and_reach_the_largest(most, ticks):
    assert _ticks(most) == pytest.approx(ticks)
