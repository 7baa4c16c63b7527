"""Treatment of each layer: its settings, its steps, and its input group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from loopq.calibrate.hessian_set import HessianSet
from loopq.calibrate.rollouts import Collection
from loopq.calibrate.select import pools
from loopq.errors import ConfigError
from loopq.gradients.measured import LoopMetrics
from loopq.layers.shared import SharedParameter
from loopq.quantizers import Method
from loopq.quantizers.config import LayerConfig
from loopq.quantizers.loop_metric import BLOCK, n_gradient_prompts
from loopq.quantizers.rtn import RTN
from loopq.quantizers.task import Task
from loopq.run.config import QuantConfig
from loopq.settings.patterns import check_patterns
from loopq.settings.steps import parse_steps


@dataclass(frozen=True)
class Plan:
    """Treatment of each layer.

    Parameters
    ----------
    config : QuantConfig
        Settings of the run.
    tasks : tuple of Task
        Layers to quantize, each with its own settings. Dense layers are omitted.
    outside : tuple of Task
        Matrices outside the loop to round to nearest.
    facts : mapping
        Facts about the choice of settings, for the checkpoint.
    """

    config: QuantConfig
    tasks: tuple[Task, ...]
    outside: tuple[Task, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, parameters: Sequence[SharedParameter], input_groups: Mapping[str, str], config: QuantConfig
    ) -> Plan:
        """Plan the layers of a source.

        Parameters
        ----------
        parameters : sequence of SharedParameter
            Shared parameters with their treatment.
        input_groups : mapping of str to str
            Maps each observed parameter to the first parameter with the same input.
        config : QuantConfig
            Settings of the run.

        Raises
        ------
        ConfigError
            A method or step does not exist, an override matches no layer, or there is no layer to quantize.
        """
        check_patterns("override", (o.pattern for o in config.overrides), (p.name for p in parameters))
        depth = max((p.invocations for p in parameters), default=0)
        planned = (_task(p, config.for_layer(p.name), input_groups, depth) for p in parameters)
        pool = pools(parameters, input_groups)
        tasks = tuple(
            replace(t, pool=pool.get(t.name) if t.input_group else None) for t in planned if t is not None
        )
        if not tasks:
            raise ConfigError(
                "nothing is left to quantize: all is excluded or dense; exclude less, or include some"
            )
        return cls(config, tasks)

    @property
    def per_step(self) -> bool:
        """Whether Hessians need separate steps, because layers of one input choose or weight steps differently."""
        steps = steps_by_input(self.tasks)
        return any(
            t.input_group and (list(t.steps) != steps[t.input_group] or t.step_weights != "sum")
            for t in self.tasks
        )

    def sums(self, job: Collection, *, per_step: bool | None = None) -> HessianSet:
        """Return empty accumulators for the tasks: one sum per input, or separate steps if a task needs them."""
        apart = self.per_step if per_step is None else per_step
        return HessianSet(job, steps_by_input(self.tasks), per_step=apart)


def loop_metrics(
    job: Collection, most: int | None, n_draws: int, steps: Sequence[int] | None = None
) -> LoopMetrics:
    """Return the collector of the loop metrics of all layers, for a dump that several plans may read.

    Parameters
    ----------
    job : Collection
        The model and its prompts.
    most : int or None
        Maximum prompts for gradients. None takes all.
    n_draws : int
        Label draws for each prompt.
    steps : sequence of int, optional
        Steps of the dump. Each layer takes those that it has; all when absent.
    """
    prompts = n_gradient_prompts(most, len(job.tokens.sequences))
    config = QuantConfig.of(method="gptq-cd", metric="loop", metric_prompts=prompts, metric_draws=n_draws)
    tasks = Plan.of(job.selection.parameters, job.selection.input_groups, config).tasks
    return LoopMetrics(job, tuple(replace(t, steps=_kept(t.parameter, steps)) for t in tasks if t.gradients))


def _kept(parameter: SharedParameter, steps: Sequence[int] | None) -> tuple[int, ...]:
    """Steps of a parameter in a dump."""
    every = range(parameter.invocations)
    return tuple(every if steps is None else sorted(set(steps) & set(every)))


def _task(
    p: SharedParameter, settings: LayerConfig, input_groups: Mapping[str, str], depth: int
) -> Task | None:
    if p.treatment == "dense" or settings.method.name == "dense":
        return None
    try:
        settings.grid.make().check_columns(p.in_features)
    except ConfigError as cause:
        raise ConfigError(f"layer {p.name}: {cause}") from None
    if p.treatment == "rtn" and (settings.method.rounds_as_published or p.name not in input_groups):
        return Task(p, settings.changed(method=rounding_like(settings)), (), None)
    input_group = input_groups.get(p.name) if settings.method.needs_hessian else None
    return Task(p, settings, steps_of(p, settings.calibration.steps, depth), input_group)


def steps_of(parameter: SharedParameter, spec: str, depth: int) -> tuple[int, ...]:
    """Return the chosen steps of a parameter. A parameter that is called once beside a loop has no choice."""
    if parameter.invocations == 1 < depth:
        return (0,)
    return tuple(parse_steps(spec, parameter.invocations))


def rounding_like(settings: LayerConfig) -> RTN:
    """Return rounding with the scale search of a method, if it has one."""
    return RTN(scale_search=getattr(settings.method, "scale_search", RTN().scale_search))


def steps_apart(tasks: Sequence[Task]) -> bool:
    """Whether paired sums of some layers need separate steps, because a step is omitted or weighted."""
    return any(t.step_weights != "sum" or len(t.steps) < t.parameter.invocations for t in tasks)


def solve_work(tasks: Sequence[Task]) -> float:
    """Cost of all solves in multiply-adds of a Hessian's accumulation."""
    return factor_work(tasks) + sum(map(sweep_work, tasks))


def factor_work(tasks: Sequence[Task]) -> float:
    """Cost of all factors. Layers with one input share one, unless they have loop metrics.

    Such a layer also has a factor for each block of its outputs.
    """
    work: dict[tuple[str | None, Method], float] = {}
    for task in (t.as_solved for t in tasks):
        p, method = task.parameter, task.config.method
        block = min(BLOCK, p.out_features)
        blocks = block**2 * p.out_features if task.gradients else 0
        key = task.name if task.gradients else task.input_group
        work[key, method] = method.work[0] * (p.in_features**3 + blocks)
    return sum(work.values())


def sweep_work(task: Task) -> float:
    """Cost of a layer's solve besides its factor. A unit for each weight stands for rounding."""
    _, per_column, per_weight = task.as_solved.config.method.work
    width, rows = task.parameter.in_features, task.parameter.out_features
    return rows * width * (per_column * width + per_weight + 1.0)


def hessian_work(tasks: Sequence[Task], n_tokens: int, shares: Mapping[str, float]) -> float:
    """Multiply-adds of the Hessians over some tokens. Experts get `shares` of them."""
    widths = {task.input_group: task.parameter.in_features for task in tasks}
    steps = steps_by_input(tasks).items()
    work = sum(shares.get(group, 1.0) * len(steps) * widths[group] ** 2 for group, steps in steps)
    return float(n_tokens * work)


def steps_by_input(tasks: Sequence[Task]) -> dict[str, list[int]]:
    """Steps that each input's Hessian must keep: the union over its layers."""
    steps: dict[str, set[int]] = {}
    for task in tasks:
        if task.input_group:
            steps.setdefault(task.input_group, set()).update(task.steps)
    return {input_group: sorted(s) for input_group, s in steps.items()}


def alike(tasks: Sequence[Task]) -> list[list[Task]]:
    """Group layers that read one input, in task order. Layers without activations stay alone."""
    sets: dict[str, list[Task]] = {}
    for task in tasks:
        sets.setdefault(task.input_group or task.name, []).append(task)
    return list(sets.values())
