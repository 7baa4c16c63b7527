"""Hessians in memory: steps apart and together, and passes within a limit."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.calibrate.hessian_set import HessianSet
from loopq.errors import ConfigError
from tests.support.runs import job_of


def test_step_choices_are_the_hessians_of_those_steps(loaded, tokens):
    job = job_of(loaded, tokens)
    steps = {p.name: [0, 1, 2] for p in job.selection.distinct_inputs}
    apart = HessianSet(job, steps, per_step=True)
    together = HessianSet(job, steps)
    for sums in (apart, together):
        sums.run_pass(list(steps))
    for input_group in steps:
        total = together.accumulators[input_group].matrix()
        np.testing.assert_array_equal(total, apart.accumulators[input_group].matrix([0, 1, 2]))
        each = [apart.accumulators[input_group].matrix([t]) for t in range(3)]
        np.testing.assert_allclose(sum(each), total, rtol=1e-15)
        assert np.linalg.eigvalsh(total)[0] > -1e-6 * np.trace(total)
        with pytest.raises(ConfigError, match=r"summed over steps \[0, 1, 2\], not \[1\]"):
            together.accumulator(input_group, [1])


def test_passes_take_the_largest_first_where_it_fits(loaded, tokens):
    job = job_of(loaded, tokens)
    steps = {p.name: [0, 1, 2] for p in job.selection.distinct_inputs}
    need = {name: 3 - number % 3 for number, name in enumerate(steps)}
    limited = HessianSet(job_of(loaded, tokens, memory=4), steps)
    passes = limited.passes(lambda groups: sum(need[g] for g in groups))
    assert sorted(g for one in passes for g in one) == sorted(steps)
    assert all(sum(need[g] for g in one) <= 4 for one in passes)
    assert need[passes[0][0]] == 3
    assert HessianSet(job, steps).passes(lambda groups: len(groups)) == [list(steps)]
    with pytest.raises(ConfigError, match=f"{next(iter(steps))}: alone it takes .* raise --memory"):
        limited.passes(lambda groups: 5)
