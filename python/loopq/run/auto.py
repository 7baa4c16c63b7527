"""Metric auto: the loop metric wherever a backward pass works."""

from __future__ import annotations

from loopq.calibrate.rollouts import Collection
from loopq.errors import LoopqError
from loopq.gradients.collect_metrics import reached
from loopq.quantizers.loop_metric import n_gradient_prompts
from loopq.run.memory import passes
from loopq.run.outside import plan_model
from loopq.run.plan import Plan


def choose_metric(plan: Plan, job: Collection) -> Plan:
    """Replace metric "auto" by "loop" and report it. If there are no gradients, take "inputs" and warn."""
    asked = [t for t in plan.tasks if t.input_group and t.config.method.flat().get("metric") == "auto"]
    if not asked:
        return plan
    loop = plan_model(plan.config.with_metric("loop"), job)
    reason = why_not(loop, job)
    if reason:
        job.execution.progress.warn(f"metric inputs, since {reason}")
        return plan_model(plan.config.with_metric("inputs"), job)
    tokens = job.tokens
    most, draws = next(t.gradients for t in loop.tasks if t.gradients)
    prompts = n_gradient_prompts(most, len(tokens.sequences))
    job.execution.progress.note(
        f"metric loop: gradients on {prompts} prompts, {draws} draw{'s' * (draws > 1)} each"
    )
    return loop


def why_not(plan: Plan, job: Collection) -> str:
    """Return why gradients are unavailable, or an empty text. It tests one prompt and the memory limit."""
    inputs = plan.config.inputs
    if not inputs.takes_gradients:
        return f"inputs {inputs.name!r} are a control for the paper's method"
    chosen = [t for t in plan.tasks if t.gradients]
    try:
        passes(job, plan.tasks, plan.sums(job))
        reached_names = reached(job.system, job.tokens, chosen, job.selection.n_steps, job.execution.seed)
    except LoopqError as error:
        return str(error).splitlines()[0]
    # An expert may receive no token of this prompt.
    missing = sorted({t.name for t in chosen if not t.parameter.routed_in} - reached_names)
    return f"no gradient reaches {missing[0]}" if missing else ""
