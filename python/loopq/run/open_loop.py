"""Inputs of the full-precision rollout for every layer; and its two variants for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from loopq.calibrate.equal_rows import EqualRows
from loopq.errors import ConfigError
from loopq.models.replace import replaced
from loopq.run import INPUTS, Inputs
from loopq.run.memory import passes

if TYPE_CHECKING:
    from loopq.quantizers.task import Task
    from loopq.run.engine import Layers, Run


@INPUTS.register("open")
@dataclass(frozen=True)
class Open(Inputs):
    """The full-precision rollout."""

    name: ClassVar[str] = "open"

    def solve(self, run: Run) -> Layers:
        """Collect and solve, pass by pass."""
        return solve_open(run, run.tasks)


def solve_open(run: Run, tasks: Sequence[Task]) -> Layers:
    """Collect the inputs of some layers in the full-precision rollout and solve them, pass by pass."""
    sums = run.sums(tasks=tasks)
    solver = run.solver(sums, run.journal("layers"))
    done: Layers = {}
    unobserved = [t for t in tasks if t.input_group is None]
    for number, input_groups in enumerate(passes(run, sums) or [[]]):
        if input_groups:
            sums.run_pass(input_groups, work=run.work(f"pass-{number}"))
        chosen = [t for t in tasks if t.input_group in input_groups] + (unobserved if number == 0 else [])
        run.collect_metrics(sums, chosen, f"metric-{number}")
        done.update(solver.run(chosen))
        for input_group in input_groups:
            sums.drop(input_group)
    return {t.name: done[t.name] for t in tasks}


@INPUTS.register("closed-loop")
@dataclass(frozen=True)
class ClosedLoop(Inputs):
    """The rollout of the model as first quantized, for the original weights once more."""

    name: ClassVar[str] = "closed-loop"

    def n_runs(self, n_passes: int, n_inputs: int) -> int:
        """One run more."""
        return max(1, n_passes) + 1

    def solve(self, run: Run) -> Layers:
        """Solve open loop, collect again, solve again."""
        layers = Open().solve(run)
        with replaced(run.job.system, {name: layer.in_model_orientation() for name, layer in layers.items()}):
            sums = run.all_steps()
        return {n: la.with_report(inputs=self.name) for n, la in run.solver(sums).run(run.tasks).items()}


@INPUTS.register("equal-rows")
@dataclass(frozen=True)
class EqualBudget(Inputs):
    """As many rows over all steps together as one step has, a control for the number of rows."""

    name: ClassVar[str] = "equal-rows"

    def n_runs(self, n_passes: int, n_inputs: int) -> int:
        """One run, with all Hessians in memory."""
        return 1

    def solve(self, run: Run) -> Layers:
        """Collect and solve."""
        if any(t.parameter.routed_in for t in run.tasks):
            raise ConfigError(
                "inputs 'equal-rows' count a token at one step only, and experts have other tokens at each step: take "
                "inputs 'open', or --exclude the experts"
            )
        if any(t.gradients for t in run.tasks):
            raise ConfigError(
                "inputs 'equal-rows' are a control for the paper's method: they go with metric 'inputs'"
            )
        return run.solver(EqualRows(run.job)).run(run.tasks)
