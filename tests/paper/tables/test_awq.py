"""Table 13: calibration step of GPTQ and AWQ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, ONE
from loopq.paper.tables import awq
from tests.support.paper import found, measured_shown_and_resumed


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


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("awq", huginn, tmp_path)
