"""Hessians in memory: steps apart and together, and passes within a limit."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.calibrate.hessian_set import HessianSet
from loopq.errors import CalibrationError, ConfigError, OutOfMemoryError
from tests.support.runs import job_of, run_of


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


def test_rounded_sums_have_the_bits_of_the_exact_ones(tiny, tokens):
    run = run_of(tiny, tokens)
    sums = run.sums()
    groups = list(sums.steps)
    sums.run_pass(groups)
    exact = dict(sums.accumulators)
    sums.round(groups)
    assert not sums.accumulators
    for group, one in exact.items():
        summed = sums.accumulator(group, sums.steps[group])
        np.testing.assert_array_equal(summed.matrix(), one.matrix())
        np.testing.assert_array_equal(summed.diagonal(), one.diagonal())
        assert [summed.n_rows(t) for t in summed.steps] == [one.n_rows(t) for t in one.steps]
        assert summed.upper.nbytes <= sums.n_bytes(group) / 2
        np.testing.assert_array_equal(summed.matrix(list(summed.steps)), one.matrix())
        for ask in (lambda x: x.matrix([0]), lambda x: x.diagonal([0])):
            if len(summed.steps) > 1:
                with pytest.raises(CalibrationError, match="were rounded as one"):
                    ask(summed)
        with pytest.raises(CalibrationError, match="were rounded as one"):
            summed.matrix(weights=[1.0] * len(summed.steps))
    sums.drop(groups[0])
    with pytest.raises(KeyError):
        sums.accumulator(groups[0], sums.steps[groups[0]])


def test_want_of_memory_for_rounding_names_the_layer(tiny, tokens, monkeypatch):
    def none(parts):
        raise MemoryError("Unable to allocate 4.00 MiB")

    sums = run_of(tiny, tokens).sums()
    sums.run_pass(list(sums.steps))
    monkeypatch.setattr(np, "concatenate", none)
    with pytest.raises(OutOfMemoryError, match=r"^layer [\w.]+weight: no memory: Unable .* --memory bounds"):
        sums.round(list(sums.steps))


def test_separate_steps_are_not_rounded(tiny, tokens):
    sums = run_of(tiny, tokens).all_steps()
    sums.round(list(sums.steps))
    assert sums.accumulators.keys() == sums.steps.keys()
