"""A running model as a source: its facts, its plans, and what it decides before a run."""

from __future__ import annotations

from loopq.run.config import QuantConfig
from loopq.run.dump_source import DumpSource
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
