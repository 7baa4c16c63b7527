"""Metric auto: the loop metric where its gradients cost at most a few times what a run of GPTQ does."""

from __future__ import annotations

from collections.abc import Sequence

from loopq.calibrate.collect import Collection
from loopq.errors import ConfigError, LoopqError
from loopq.gradients.collect_metrics import draws, metric_cost
from loopq.quantizers.gptq import GPTQ
from loopq.quantizers.loop_metric import LEAST, n_gradient_prompts
from loopq.quantizers.task import Task
from loopq.run.memory import passes
from loopq.run.plan import Plan, hessian_work, solve_work
from loopq.run.source import ModelSource
from loopq.settings.execution import available_bytes

#: Most that gradients may cost, in multiples of a run of GPTQ.
AFFORDABLE = 6.0
#: A double-precision product costs as much as this many in single precision.
DOUBLE = 2.0


def choose_metric(plan: Plan, source: ModelSource) -> Plan:
    """Put "loop" or "inputs" in the place of metric "auto", and say which and why.

    Notes
    -----
    Where no number of prompts is asked for and their usual share costs more than `AFFORDABLE`, gradients are taken on
    as many as cost no more, but on no fewer than `LEAST`. Costs are counted in multiply-adds, not timed, so that every
    machine chooses alike, unless its memory is too small for the gradients.
    """
    asked = [t for t in plan.tasks if t.input_group and t.config.method.flat().get("metric") == "auto"]
    if not asked:
        return plan
    config, note = plan.config, source.execution.progress.note
    loop = source.plan(config.with_metric("loop"))
    try:
        ratio = cost_of_gradients(loop, source)
    except ConfigError as error:
        note(f"metric inputs, since with gradients {error}")
        return source.plan(config.with_metric("inputs"))
    most = next(t.gradients[0] for t in loop.tasks if t.gradients)
    prompts = n_gradient_prompts(most, len(source.job.tokens.sequences))
    fewer = int(prompts * AFFORDABLE / ratio)
    if ratio > AFFORDABLE and most is None and fewer >= LEAST:
        loop, prompts = source.plan(config.with_metric("loop", metric_prompts=fewer)), fewer
        ratio = cost_of_gradients(loop, source)
    cost = f"gradients on {prompts} prompts cost {ratio:.1f} times a run of GPTQ"
    reason = cost if ratio > AFFORDABLE else why_not(loop, source)
    if reason:
        note(f"metric inputs, since {reason}; `--metric loop` (preset best) has less KL where it can be had")
        return source.plan(config.with_metric("inputs"))
    note(f"metric loop: {cost}; `--metric inputs` (preset fast) needs none, for more KL (docs/quantizers.md)")
    return loop


def cost_of_gradients(plan: Plan, source: ModelSource) -> float:
    """Multiply-adds of the loop metrics, over those of a run of GPTQ: rollouts, Hessians, solves."""
    job, tasks = source.job, plan.tasks
    tokens, shares = job.tokens, job.selection.shares
    rollout = tokens.n_tokens * sum(
        p.in_features * p.out_features * p.invocations * shares.get(p.name, 1.0)
        for p in job.selection.parameters
    )
    n_inputs = len({t.input_group for t in tasks if t.input_group and not t.parameter.routed_in})
    runs = plan.config.inputs.n_runs(len(passes(job, tasks, source.sums(plan))), n_inputs)
    metric = metric_cost(tasks, len(tokens.sequences), source.execution.memory)
    rollouts = metric.n_gradients / metric.n_draws + 2 * metric.n_gradients
    gradients = rollout / len(tokens.sequences) * rollouts + DOUBLE * metric.multiply_adds
    hessian = hessian_work(tasks, tokens.n_tokens, shares)
    return gradients / (rollout * runs + hessian + solve_work(tasks, GPTQ()))


def why_not(plan: Plan, source: ModelSource) -> str:
    """Return why gradients cannot be had, or nothing: one prompt is tried, if memory allows."""
    inputs = plan.config.inputs
    if not inputs.takes_gradients:
        return f"inputs {inputs.name!r} are a control for the paper's method"
    chosen = [t for t in plan.tasks if t.gradients]
    weights = sum(t.parameter.in_features * t.parameter.out_features for t in chosen)
    # A copy of each weight and its gradient, in single precision, besides the sums.
    need = 8 * weights + metric_cost(plan.tasks, len(source.job.tokens.sequences)).memory
    free = available_bytes()
    if free is not None and source.job.system.device.type == "cpu" and need > free:
        return f"gradients need {need / 2**30:.1f} GiB and {free / 2**30:.1f} are free"
    return _tried(source.job, chosen)


def _tried(job: Collection, tasks: Sequence[Task]) -> str:
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
