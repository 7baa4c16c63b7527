"""Maps of the error by layer and step: measured, or of plain rounding where nothing has been quantized."""

from __future__ import annotations

import re

import pytest

from loopq.analysis.report.errors import error_maps
from tests.analysis.report.conftest import errors


def cells(text):
    return re.findall(r"<td class=h(\d)>([\d.]+)</td>", text)


def test_both_maps_of_a_checkpoint_and_what_they_show():
    text = error_maps(errors(Q4=1.0), None)
    assert [v for _, v in cells(text)] == [
        "2.0", "2.6", "3.3", "4.2", "5.4", "6.9", "9.0", "11", *["1.0"] * 4, *["2.7"] * 4,
    ]  # fmt: skip
    assert [int(shade) for shade, _ in cells(text)][:8] == [0, 1, 2, 3, 4, 5, 6, 6]
    assert "<li>mlp adds most by itself: 2.7\u00a0% of its output" in text
    assert "the error grows: 3.7\u00a0% of a layer&#x27;s output at step 0, 7.6\u00a0% at the last" in text


def test_checkpoints_have_the_same_shades():
    text = error_maps(errors(Q4=1.0, Q3=4.0), None)
    maps = text.split("<table class=heat")[1:]
    assert len(maps) == 4
    # 4 times as large: darker, and the same value has the same shade.
    assert max(int(s) for s, _ in cells(maps[0])) < max(int(s) for s, _ in cells(maps[2])) == 6
    shade = {value: {s for s, v in cells(maps[0]) + cells(maps[2]) if v == value} for value in ("11", "22")}
    assert all(len(shades) == 1 for shades in shade.values())
    assert "Q3: Error as it arrives" in text


def test_a_diagnosis_shows_what_rounding_would_do(diagnosis):
    text = error_maps(None, diagnosis)
    assert "No weight has been quantized yet" in text
    ranks = diagnosis["sections"]["ranks"]
    worst = max(
        (e / of) ** 0.5
        for n, row in ranks["proxies"].items()
        for e, of in zip(row, ranks["outputs"][n], strict=True)
    )
    assert max(float(v) for _, v in cells(text)) == pytest.approx(100 * worst, rel=0.06)
    assert error_maps(None, {**diagnosis, "sections": {}}) == ""
