"""Sums of batches that several processes and runs take."""

from __future__ import annotations

import contextlib
import copy
import shutil

import numpy as np
import pytest

from loopq.calibrate.data import from_ids
from loopq.calibrate.hessian_set import HessianSet
from loopq.calibrate.parts import Parts, Range, Saved
from loopq.calibrate.rollouts import Collection
from loopq.errors import CalibrationError
from tests.support.kills import Kill, Killer
from tests.support.marks import slow_unless
from tests.support.runs import job_of


@pytest.fixture
def ragged(loaded, tokens):
    """Prompts of several lengths: some 2,400 rows for each step, no batch of whole blocks."""
    lengths = [7, 24, 19, 24, 24, 3, 11, 24, 24, 24]
    sequences = [s[:n] for _ in range(12) for s, n in zip(tokens.sequences, lengths, strict=True)]
    return from_ids(sequences)


def sums_of(job, work=None, steps=(0, 1, 2)):
    sums = HessianSet(job, {p.name: steps for p in job.selection.distinct_inputs[:2]}, per_step=True)
    sums.run_pass(list(sums.steps), work=work)
    return {
        k: (acc.n_rows(1), [acc.matrix([t]).tobytes() for t in steps]) for k, acc in sums.accumulators.items()
    }


@pytest.mark.parametrize("seed", slow_unless(lambda seed: seed == 2, range(3)))
def test_whoever_runs_which_batch_the_sums_are_the_same_bits(loaded, ragged, tmp_path, monkeypatch, seed):
    """Ranks of several world sizes are killed after some prompts each; one process adds up what is there in the end."""
    monkeypatch.setattr("loopq.calibrate.hessian_set.POLL", 0.0)
    rng = np.random.default_rng(seed)
    monkeypatch.setattr("loopq.storage.journal.SNAPSHOT_SECONDS", [0.0, 0.0, 0.02][seed])
    monkeypatch.setattr("loopq.storage.journal.SNAPSHOT_TIMES", 0.0)
    work = tmp_path / "work"
    for world in (4, 3, 2, 5):
        for rank in rng.permutation(world):
            job = job_of(loaded, ragged, batch_size=3, progress=Killer(int(rng.integers(1, 60))))
            sums = HessianSet(
                job, {p.name: (0, 1, 2) for p in job.selection.distinct_inputs[:2]}, per_step=True
            )
            # The last one of each world is not killed where all is done.
            with contextlib.suppress(Kill):
                sums.share_pass(list(sums.steps), work, (int(rank), world), lambda: False)
    assert len(list(work.glob("*/part-*"))) > 1
    by_name = sums_of(job_of(loaded, ragged, batch_size=3), work)
    assert by_name == sums_of(job_of(loaded, ragged, batch_size=3))


@pytest.mark.parametrize(
    "saved",
    slow_unless(
        lambda saved: len(saved) != 1, [[], [False], [True, False], [False] * 5 + [True] + [False] * 40]
    ),
)
def test_sums_are_saved_once_a_minute_alone(loaded, ragged, tmp_path, monkeypatch, saved):
    """A pass of less than a minute writes nothing; what follows the last part is added to it in memory."""
    job = job_of(loaded, ragged, batch_size=3)
    whole = sums_of(job)
    due = iter(saved)
    monkeypatch.setattr("loopq.storage.journal.Snapshots.due", lambda _: next(due, False))
    assert sums_of(job, tmp_path) == whole
    assert len(list(tmp_path.glob("*/part-*.safetensors"))) == sum(saved)
    assert sums_of(job, tmp_path) == whole, "resumed"


@pytest.mark.slow
def test_a_batch_that_two_parts_hold_counts_once(loaded, ragged, tmp_path, monkeypatch):
    monkeypatch.setattr("loopq.storage.journal.Snapshots.due", lambda self: True)
    job = job_of(loaded, ragged, batch_size=3)
    whole = sums_of(job, tmp_path)
    part, *_ = tmp_path.glob("*/part-*.safetensors")
    for file in list(part.parent.glob("*.safetensors")):
        shutil.copy(file, file.with_name(file.name.replace("part-", "part-0")))
    assert sums_of(job, tmp_path) == whole


def test_a_part_that_was_altered_between_two_runs_is_an_error(loaded, tokens, tmp_path, monkeypatch):
    """Parts count by the rows of their open blocks, which say that the sums before them are whole."""
    monkeypatch.setattr("loopq.storage.journal.Snapshots.due", lambda _: True)
    job = job_of(loaded, tokens, batch_size=3)
    input_group = job.selection.distinct_inputs[0].name

    def collect():
        sums = HessianSet(job, {input_group: [0, 1, 2]})
        sums.run_pass([input_group], work=tmp_path / "work")
        return sums.accumulators[input_group].matrix()

    whole = collect()
    np.testing.assert_array_equal(collect(), whole)
    part = next((tmp_path / "work").glob("*/sums-part-*-0.safetensors"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(CalibrationError, match="was removed or altered; remove the folder and start anew"):
        collect()


def test_processes_divide_only_what_has_one_row_for_each_token(loaded, ragged, tmp_path, monkeypatch):
    job = job_of(loaded, ragged, batch_size=3)
    right = job.batch_tokens
    monkeypatch.setattr(Collection, "batch_tokens", [n + 1 for n in right])
    sums = HessianSet(job, {p.name: (0, 1, 2) for p in job.selection.distinct_inputs})
    with pytest.raises(
        CalibrationError, match=r"step 0, batch 42: 7 rows of 8 tokens; several processes can only"
    ):
        sums.share_pass(list(sums.steps), tmp_path / "work", (1, 2), lambda: False)


def test_of_two_parts_with_one_batch_the_larger_counts():
    small, large, other = ([Range(a, b, {}, {})] for a, b in ((1, 3), (2, 6), (0, 1)))
    saved = Saved({"part-a": small, "part-b": large, "part-c": other})
    assert saved.parts == {"part-b": large, "part-c": other}
    assert saved.batches == {0, 2, 3, 4, 5}
    assert Saved().batches == set()


def _shifted(ranges):
    shifted = copy.deepcopy(ranges)
    for steps in shifted[0].before.values():
        steps[0] += 1
    return shifted


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda ranges: ranges[:-1], "batches are missing; give the same command again"),
        (_shifted, "rows before batch 0, which counts 1: the saved sums are of another run; remove"),
    ],
)
def test_parts_that_are_not_one_run_are_refused(loaded, ragged, monkeypatch, change, said):
    count = Parts._count_rows
    monkeypatch.setattr(Parts, "_count_rows", lambda self, ranges: count(self, change(ranges)))
    with pytest.raises(CalibrationError, match=said):
        sums_of(job_of(loaded, ragged.take(0, 4), batch_size=2))
