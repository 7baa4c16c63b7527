"""A running model as a source: its facts, its plans, and what it decides before a run."""

from __future__ import annotations

import contextlib
import tempfile

import pytest

from loopq.errors import DumpError
from loopq.run.config import QuantConfig
from loopq.run.dump_source import DumpSource
from loopq.run.memory import pass_bytes
from loopq.run.ranks import Ranks
from loopq.terminal.progress import Silent
from tests.support.runs import run_of


class Notes(Silent):
    """Keeps what a run says."""

    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)


def test_a_source_decides_the_metric_and_tells_the_cost(loaded, tokens):
    notes = Notes()
    run = run_of(loaded, tokens, QuantConfig.of(group_size=20), progress=notes)
    assert run.config.layer.method.flat()["metric"] == "auto"
    plan = run.source.prepare(run.plan)
    assert plan.config.layer.method.flat()["metric"] == "loop"
    assert [t.name for t in plan.tasks] == [t.name for t in run.tasks]
    (cost,) = [line for line in notes.lines if line.startswith(f"{len(plan.tasks)} layers, 3 steps: about ")]
    assert "MiB at most" in cost


def test_matrices_outside_the_loop_are_planned_where_asked(tiny, tokens, monkeypatch):
    monkeypatch.setattr("loopq.run.outside.LEAST", 16)
    source = run_of(tiny, tokens).source
    assert source.plan(QuantConfig()).outside == ()
    plan = source.plan(QuantConfig.of(outside=8))
    assert {t.config.grid.bits for t in plan.outside} == {8}
    assert not {t.name for t in plan.outside} & {t.name for t in plan.tasks}


def test_sums_are_of_the_inputs_of_the_tasks(tiny, tokens):
    plan, source = run_of(tiny, tokens)
    inputs = {t.input_group for t in plan.tasks}
    assert set(source.sums(plan).steps) == inputs
    first = plan.tasks[0]
    one = source.sums(plan, [first], per_step=True)
    assert (set(one.steps), one.per_step) == ({first.input_group}, True)


def test_ranks_collect_a_dump_with_what_the_plan_needs(tiny, tokens, tmp_path, monkeypatch):
    plan, source = run_of(tiny, tokens, QuantConfig.of(metric="inputs", steps="1:"))
    dumps = []

    def collect(ranks, dump):
        dumps.append((ranks, dump.sums.steps, dump.sums.per_step, dump.gradients))
        dump.out.mkdir()
        (dump.out / "manifest.json").touch()

    monkeypatch.setattr("loopq.run.model_source.collect_hessians", collect)
    monkeypatch.setattr(DumpSource, "open", classmethod(lambda cls, folder, execution: folder))
    ranks = Ranks(1, 2)
    folder = source.divisible(plan, tmp_path, ranks)
    assert source.divisible(plan, tmp_path, ranks) == folder
    assert folder.parent == tmp_path
    assert dumps == [(ranks, {t.input_group: list(t.steps) for t in plan.tasks}, False, None)]
    assert all(min(t.steps) == 1 for t in plan.tasks)


def test_the_sums_of_a_pass_are_files_until_the_next(tiny, tokens, tmp_path):
    config = QuantConfig.of(metric="loop")
    free = run_of(tiny, tokens, config)
    most = max(pass_bytes(free.job, free.tasks, free.sums(), [x]) for x in free.sums().steps)
    plan, source = run_of(tiny, tokens, config, memory=most, work=tmp_path)
    # A killed run left it.
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "left").touch()
    n_passes, names = 0, []
    for tasks, hessians, metrics in source.parts(plan, plan.tasks):
        n_passes += 1
        inputs = {t.input_group: t.steps for t in tasks}
        files = [path.parent.name for path in (tmp_path / "sums").rglob("*.safetensors")]
        assert sorted(files) == ["hessians"] * len(inputs) + ["metrics"] * len(metrics)
        assert all(hessians.accumulator(name, steps).n_rows(0) for name, steps in inputs.items())
        assert set(metrics) == {t.metric_key for t in tasks}
        names += [t.name for t in tasks]
    assert n_passes > 1
    assert sorted(names) == sorted(t.name for t in plan.tasks)
    assert not (tmp_path / "sums").exists()
    assert not source.metrics


def test_without_a_work_folder_the_sums_are_temporary_files(tiny, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plan, source = run_of(tiny, tokens)
    with contextlib.closing(source.parts(plan, plan.tasks)) as parts:
        next(parts)
        assert len(list(tmp_path.glob("loopq-*/hessians/*"))) == len(source.sums(plan).steps)
    assert not list(tmp_path.iterdir())


def test_metrics_in_memory_are_not_collected_again(tiny, tokens):
    plan, source = run_of(tiny, tokens, QuantConfig.of(metric="loop"))
    source.collect_metrics(plan, source.all_steps(plan), plan.tasks)
    ((_, part, metrics),) = source.parts(plan, plan.tasks)
    assert part.metrics == []
    assert {key: metrics[key] for key in metrics} == source.metrics


def test_a_disk_too_small_for_a_pass_is_told_before_it(tiny, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr("loopq.calibrate.hessian_dump.free_bytes", lambda path: 1000)
    plan, source = run_of(tiny, tokens, work=tmp_path)
    with pytest.raises(
        DumpError, match=r"the sums of a pass take .*, the disk has 1\.00 kB: free some space"
    ):
        list(source.parts(plan, plan.tasks))
    assert not (tmp_path / "sums").exists()
