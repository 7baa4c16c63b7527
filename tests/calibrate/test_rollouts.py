"""Rollouts of a calibration set: batches, their order, and which rows arrive."""

from __future__ import annotations

import dataclasses

import pytest

from loopq.calibrate.rollouts import run_rollouts
from loopq.errors import CalibrationError
from tests.support.runs import job_of


def ignore(input_group, step, rows):
    """Take rows and do nothing."""


def test_batches_begin_at_the_first_one_asked_for(loaded, tokens):
    job = job_of(loaded, tokens, batch_size=3)
    assert list(run_rollouts(job, ignore)) == list(range(job.n_batches))
    assert list(run_rollouts(job, ignore, first=2)) == [*range(2, job.n_batches), 0, 1]
    assert list(run_rollouts(job, ignore, wanted=lambda number: number % 2 == 0)) == list(
        range(0, job.n_batches, 2)
    )


def test_a_sink_gets_the_rows_of_the_chosen_inputs_once(loaded, tokens):
    job = job_of(loaded, tokens, batch_size=3)
    first, *_ = job.selection.distinct_inputs
    rows = {}

    def count(input_group, step, values):
        rows[input_group, step] = rows.get((input_group, step), 0) + values.shape[0]

    list(run_rollouts(job, count, only=[first.name]))
    assert rows == {(first.name, step): tokens.n_tokens for step in range(first.invocations)}
    assert sum(job.batch_tokens) == tokens.n_tokens


def test_layers_that_no_longer_read_one_input_are_refused(loaded, tokens):
    job = job_of(loaded, tokens)
    first, second, *_ = job.selection.distinct_inputs
    groups = job.selection.input_groups | {second.name: first.name}
    wrong = dataclasses.replace(job, selection=dataclasses.replace(job.selection, input_groups=groups))
    with pytest.raises(CalibrationError, match=f"layer {second.name}, step 0: reads another input"):
        list(run_rollouts(wrong, ignore))


def test_the_fingerprint_is_of_all_that_determines_rows(loaded, tokens):
    job = job_of(loaded, tokens)
    same = job_of(loaded, tokens, threads=2)
    assert job.fingerprint("x") == same.fingerprint("x") != job.fingerprint("y")
    others = [
        job_of(loaded, tokens, seed=1),
        job_of(loaded, tokens, batch_size=1),
        job_of(loaded, tokens.take(0, 2)),
    ]
    assert len({j.fingerprint("x") for j in (job, *others)}) == 4
