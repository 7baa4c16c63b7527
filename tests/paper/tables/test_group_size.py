"""Table 17: group size of rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loopq.paper.bench import Bench
from loopq.paper.tables import group_size
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("group-size", huginn, tmp_path)


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
