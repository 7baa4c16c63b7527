"""Appendix J: Hessians of the quantized rollout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, RTN
from loopq.paper.tables import closed_loop
from tests.support.paper import found, measured_shown_and_resumed


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


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("closed-loop", huginn, tmp_path)
