"""A layer to be solved: its steps and its input."""

from __future__ import annotations

from loopq.quantizers.config import Override
from loopq.run.config import QuantConfig
from loopq.run.plan import steps_by_input
from tests.support.runs import run_of


def test_tasks_have_steps_and_the_input_that_they_share(tiny, tokens):
    run = run_of(tiny, tokens, QuantConfig.of(Override("*adapter*", {"steps": "2"}), steps="0:2"))
    tasks = {t.name: t for t in run.tasks}
    assert list(tasks) == [p.name for p in tiny.system.shared_parameters(3)]
    assert tasks["transformer.adapter.weight"].steps == (2,)
    assert {t.steps for n, t in tasks.items() if "adapter" not in n} == {(0, 1)}
    assert {n: t.input_group for n, t in tasks.items()} == run.job.selection.input_groups
    adapter = "transformer.adapter.weight"
    assert steps_by_input(run.tasks) == {
        input_group: [2] if input_group == adapter else [0, 1]
        for input_group in run.job.selection.input_groups.values()
    }
