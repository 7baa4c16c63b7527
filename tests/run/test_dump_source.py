"""A run from a dump: the bytes of a run from the model, and what a dump cannot do."""

from __future__ import annotations

import pytest

import loopq
from loopq.calibrate.collect import collect_rows
from loopq.calibrate.hessian_dump import collect_hessians
from loopq.errors import ConfigError, DumpError
from loopq.run.config import QuantConfig
from loopq.run.dump_source import DumpSource
from loopq.run.plan import loop_metrics
from loopq.settings.execution import Execution
from tests.support.metric_dumps import collected
from tests.support.runs import SETTINGS, digest, job_of


@pytest.mark.slow
def test_solve_from_a_dump_gives_the_same_bytes(loaded, tokens, tmp_path, checkpoint_folder):
    for shards in (1, 2, 7):
        dump = tmp_path / f"dump-{shards}"
        collect_rows(job_of(loaded, tokens, batch_size=3), dump, shard_batches=shards)
        for threads in (1, 2):
            out = tmp_path / f"solved-{shards}-{threads}"
            loopq.solve(dump, out=out, threads=threads, **SETTINGS)
            assert digest(out) == digest(checkpoint_folder)


def test_solve_from_hessians_gives_the_same_bytes(loaded, tokens, tmp_path, checkpoint_folder):
    for per_step in (False, True):
        dump = tmp_path / f"hessians-{per_step}"
        collect_hessians(job_of(loaded, tokens, batch_size=3), dump, per_step=per_step)
        loopq.solve(dump, out=tmp_path / f"out-{per_step}", **SETTINGS)
        assert digest(tmp_path / f"out-{per_step}") == digest(checkpoint_folder)


def test_a_dump_says_what_it_cannot_do(dump):
    with pytest.raises(
        DumpError, match=r"no loop metric of layer transformer\.adapter\.weight: collect again"
    ):
        loopq.solve(dump, metric="loop")
    with pytest.raises(ConfigError, match="inputs 'asymmetric' run the model between layers"):
        loopq.solve(dump, inputs="asymmetric")
    with pytest.raises(ConfigError, match="fit runs the model"):
        loopq.solve(dump, fit=3.5)


def test_a_dump_takes_the_metric_that_it_holds(loaded, tokens, dump, tmp_path):
    plain = DumpSource.open(dump, Execution())
    assert plain.plan(QuantConfig()).config.layer.method.flat()["metric"] == "inputs"
    job = job_of(loaded, tokens)
    collect_hessians(job, tmp_path / "metric", gradients=loop_metrics(job, 3, 2))
    layer = DumpSource.open(tmp_path / "metric", Execution()).plan(QuantConfig()).config.layer.method.flat()
    assert [layer[name] for name in ("metric", "metric_prompts", "metric_draws")] == ["loop", 3, 2]


def test_a_dump_is_itself_what_processes_divide(dump, tmp_path):
    source = DumpSource.open(dump, Execution())
    plan = source.plan(QuantConfig())
    assert source.divisible(plan, tmp_path, None) is source
    assert source.prepare(plan) is plan


def test_a_metric_is_read_when_its_layer_is_solved(loaded, tokens, tmp_path):
    source = DumpSource.open(collected(loaded, tokens, tmp_path / "metric"), Execution())
    plan = source.plan(QuantConfig())
    metrics = source.metrics(plan.tasks)
    first, *others = metrics
    assert set(metrics) == {t.metric_key for t in plan.tasks}
    (tmp_path / "metric" / source.dump.sums.metric_file(first[0], first[1]).file).unlink()
    assert first in metrics
    with pytest.raises(DumpError, match="missing"):
        metrics[first]
    assert all(metrics[key].n_gradients == 6 for key in others)
    assert metrics.get(("another", (0,), None)) is None
