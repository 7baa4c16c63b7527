"""Metric auto: the loop metric where its gradients cost at most a few times what a run of GPTQ does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loopq.errors import ConfigError, LoopqError
from loopq.gradients.collect_metrics import draws, metric_cost
from loopq.quantizers.gptq import GPTQ
from loopq.quantizers.loop_metric import LEAST, n_gradient_prompts
from loopq.quantizers.task import Task
from loopq.run.memory import passes
from loopq.run.plan import hessian_work, solve_work
from loopq.settings.execution import available_bytes

if TYPE_CHECKING:
    from loopq.run.engine import Run

#: Most that gradients may cost, in multiples of a run of GPTQ.
AFFORDABLE = 6.0
#: A double-precision product costs as much as this many in single precision.
DOUBLE = 2.0


def choose_metric(run: Run) -> Run:
    """Put "loop" or "inputs" in the place of metric "auto", and say which and why.

    Notes
    -----
    Where no number of prompts is asked for and their usual share costs more than `AFFORDABLE`, gradients are taken on
    as many as cost no more, but on no fewer than `LEAST`. Costs are counted in multiply-adds, not timed, so that every
    machine chooses alike, unless its memory is too small for the gradients.
    """
    asked = [t for t in run.tasks if t.input_group and t.config.method.flat().get("metric") == "auto"]
    if not asked:
        return run
    loop = run.with_config(run.config.with_metric("loop"))
    try:
        ratio = cost_of_gradients(loop)
    except ConfigError as error:
        run.execution.progress.note(f"metric inputs, since with gradients {error}")
        return run.with_config(run.config.with_metric("inputs"))
    most = next(t.gradients[0] for t in loop.tasks if t.gradients)
    prompts = n_gradient_prompts(most, len(run.job.tokens.sequences))
    fewer = int(prompts * AFFORDABLE / ratio)
    if ratio > AFFORDABLE and most is None and fewer >= LEAST:
        loop, prompts = run.with_config(run.config.with_metric("loop", metric_prompts=fewer)), fewer
        ratio = cost_of_gradients(loop)
    cost = f"gradients on {prompts} prompts cost {ratio:.1f} times a run of GPTQ"
    reason = cost if ratio > AFFORDABLE else why_not(loop)
    if reason:
        run.execution.progress.note(
            f"metric inputs, since {reason}; `--metric loop` (preset best) has less KL where it can be had"
        )
        return run.with_config(run.config.with_metric("inputs"))
    run.execution.progress.note(
        f"metric loop: {cost}; `--metric inputs` (preset fast) needs none, for more KL (docs/quantizers.md)"
    )
    return loop


def cost_of_gradients(run: Run) -> float:
    """Multiply-adds of the loop metrics, over those of a run of GPTQ: rollouts, Hessians, solves."""
    tokens, tasks, shares = run.job.tokens, run.tasks, run.job.selection.shares
    rollout = tokens.n_tokens * sum(
        p.in_features * p.out_features * p.invocations * shares.get(p.name, 1.0)
        for p in run.job.selection.parameters
    )
    n_inputs = len({t.input_group for t in tasks if t.input_group and not t.parameter.routed_in})
    runs = run.config.inputs.n_runs(len(passes(run, run.sums())), n_inputs)
    metric = metric_cost(tasks, len(tokens.sequences), run.execution.memory)
    rollouts = metric.n_gradients / metric.n_draws + 2 * metric.n_gradients
    gradients = rollout / len(tokens.sequences) * rollouts + DOUBLE * metric.multiply_adds
    hessian = hessian_work(tasks, tokens.n_tokens, shares)
    return gradients / (rollout * runs + hessian + solve_work(tasks, GPTQ()))


def why_not(run: Run) -> str:
    """Return why gradients cannot be had, or nothing: one prompt is tried, if memory allows."""
    if run.config.inputs.name == "equal-rows":
        return "inputs 'equal-rows' are a control for the paper's method"
    chosen = [t for t in run.tasks if t.gradients]
    weights = sum(t.parameter.in_features * t.parameter.out_features for t in chosen)
    # A copy of each weight and its gradient, in single precision, besides the sums.
    need = 8 * weights + metric_cost(run.tasks, len(run.job.tokens.sequences)).memory
    free = available_bytes()
    if free is not None and run.job.system.device.type == "cpu" and need > free:
        return f"gradients need {need / 2**30:.1f} GiB and {free / 2**30:.1f} are free"
    return _tried(run, chosen)


def _tried(run: Run, tasks: Sequence[Task]) -> str:
    job = run.job
    names = [t.name for t in tasks]
    try:
        found = next(
            draws(job.system, job.tokens.take(0, 1), names, job.selection.n_steps, job.execution.seed, 1)
        )
    except LoopqError as error:
        return str(error).splitlines()[0]
    except RuntimeError as error:
        # torch's word for a graph that does not reach the weights.
        return f"a backward pass fails: {str(error).splitlines()[0]}"
    # An expert may be given no token of this prompt.
    missing = sorted({t.name for t in tasks if not t.parameter.routed_in} - set(found))
    return f"no gradient reaches {missing[0]}" if missing else ""
