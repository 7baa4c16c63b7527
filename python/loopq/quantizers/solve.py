"""Quantize every layer of a selection from collected Hessians, one input group after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.checkpoint.files import (
    RawTensor,
    read_json,
    read_tensors,
    remove_own,
    sha256,
    write_json,
    write_tensors,
)
from loopq.checkpoint.layer import LayerSettings, QuantizedLayer, TensorReader
from loopq.checkpoint.schema import checked
from loopq.config import LayerConfig, QuantConfig, parse_step_weights, parse_steps
from loopq.errors import ConfigError, NonFiniteError
from loopq.progress import Progress, Silent
from loopq.quantizers import QUANTIZERS
from loopq.quantizers.base import Problem
from loopq.quantizers.metric import LoopMetric
from loopq.quantizers.weighting import (
    StepSource,
    Weighting,
    alpha_weights,
    balanced_weights,
    combine,
    loss_weights,
    minimax_weights,
    needs_weight,
    trace_weights,
)
from loopq.rotation import parse_rotation
from loopq.systems.base import SharedParameter


class Source(Protocol):
    """Where Hessians come from: accumulators in memory, or a dump."""

    def accumulator(
        self, leader: str, steps: Sequence[int], *, per_step: bool = False, threads: int = 0
    ) -> native.HessianAccumulator:
        """Return the finished accumulator of an input group over the steps chosen, each apart if asked and possible."""


@dataclass(frozen=True)
class Task:
    """One layer, what is asked for it, and whom it shares its input with."""

    parameter: SharedParameter
    config: LayerConfig
    steps: tuple[int, ...]
    leader: str | None


@dataclass(frozen=True)
class LayerStore:
    """Solved layers on disk, until the checkpoint is written: a killed run takes over those of the same key.

    Parameters
    ----------
    work : Path or None
        Folder; None keeps nothing.
    key : str
        Identity of the work: everything that fixes a layer.
    """

    work: Path | None
    key: str

    def keep(self, name: str, layer: QuantizedLayer, part: str = "") -> None:
        """Write a layer; `part` tells several of one name apart."""
        path = self._path(name, part)
        if path is None:
            return
        digest = write_tensors(path, layer.tensors())
        journal = {
            "key": self.key,
            "sha256": digest,
            "settings": layer.settings(),
            "report": dict(layer.report),
        }
        write_json(path.with_suffix(".json"), journal)

    def find(self, name: str, part: str = "") -> QuantizedLayer | None:
        """Read a layer back; None where there is none of this work."""
        path = self._path(name, part)
        if path is None or not path.with_suffix(".json").is_file():
            return None
        journal = read_json(path.with_suffix(".json"))
        # A kill between the two writes leaves the journal of one solve beside the tensors of another.
        if journal["key"] != self.key or not path.is_file() or sha256(path) != journal["sha256"]:
            return None
        settings = checked(LayerSettings, journal["settings"], path)
        return QuantizedLayer.from_tensors(
            settings, TensorReader(str(path), read_tensors(path)), journal["report"]
        )

    def _path(self, name: str, part: str) -> Path | None:
        # Runs of other settings share the folder, as those that step weights are chosen from.
        return self.work / f"layers{part}" / self.key[:16] / f"{name}.safetensors" if self.work else None


@dataclass
class Solver:
    """Solves the tasks of a run.

    Parameters
    ----------
    weight : callable
        Parameter to its stored weight.
    source : Source
        Hessians.
    rank_threshold : float or None
        Threshold of the rank in the report, relative to the largest eigenvalue; None leaves it out.
    threads : int
        Threads; 0 takes all cores.
    work : Path, optional
        Folder where solved layers are kept until the checkpoint is written; layers of the same key found
        there are taken over.
    key : str
        Identity of the work.
    progress : Progress
        Told of layers.
    metrics : mapping of str to LoopMetric
        Loop metrics of the layers that ask for one.
    """

    weight: Callable[[SharedParameter], RawTensor]
    source: Source
    rank_threshold: float | None = 1e-3
    threads: int = 0
    work: Path | None = None
    key: str = ""
    progress: Progress = field(default_factory=Silent)
    metrics: Mapping[str, LoopMetric] = field(default_factory=dict)

    def run(self, tasks: Sequence[Task], total: int | None = None) -> dict[str, QuantizedLayer]:
        """Solve all tasks; return the layers by parameter name, in the order of the tasks."""
        self.progress.start("solve", total or len(tasks), "layers")
        solved: dict[str, QuantizedLayer] = {}
        for group in _groups(tasks):
            solved.update(self._group(group))
        self.progress.stop()
        return {t.parameter.name: solved[t.parameter.name] for t in tasks}

    def _group(self, tasks: Sequence[Task]) -> dict[str, QuantizedLayer]:
        kept = LayerStore(self.work, self.key)
        done = {t.parameter.name: kept.find(t.parameter.name) for t in tasks}
        if any(layer is None for layer in done.values()):
            lead = tasks[0]
            acc = self._accumulator(lead) if lead.leader else None
            common = None
            shared: dict[Any, Any] = {}
            for task in tasks:
                if done[task.parameter.name] is None:
                    if acc is not None and (common is None or needs_weight(task.config.step_weights)):
                        common, shared = self._seen(acc, task), {}
                    layer = self._solve(task, common, shared).with_report(**self._spectrum(common, shared))
                    kept.keep(task.parameter.name, layer)
                    done[task.parameter.name] = layer
                self.progress.advance()
        else:
            self.progress.advance(len(tasks))
        return {name: layer for name, layer in done.items() if layer is not None}

    def _accumulator(self, task: Task) -> native.HessianAccumulator:
        apart = task.config.step_weights != "sum"
        return self.source.accumulator(str(task.leader), task.steps, per_step=apart, threads=self.threads)

    def _seen(self, acc: native.HessianAccumulator, task: Task) -> Seen:
        """Weigh the steps of a task and add their Hessians."""
        weights = self._weights(acc, task)
        rows = {t: acc.n_rows(t) for t in task.steps}
        if weights is None:
            return Seen(np.asarray(acc.matrix(list(task.steps)), dtype=np.float64), rows, None)
        if not acc.per_step:
            raise ConfigError(
                f"layer {task.parameter.name}: step_weights {task.config.step_weights!r} need the Hessian of each "
                "step; only their sum was collected: collect again with each step apart"
            )
        total = float(sum(weights))
        return Seen(combine(acc, task.steps, weights), rows, [float(w) / total for w in weights])

    def _weights(self, acc: native.HessianAccumulator, task: Task) -> Weighting | None:
        if parse_step_weights(task.config.step_weights) != "sum" and not acc.per_step:
            # Refused by the caller, with the layer's name.
            return []
        return step_weighting(
            acc,
            task,
            lambda: oriented(self.weight(task.parameter), task.parameter),
            self.metrics.get(task.parameter.name),
            self.threads,
        )

    def _spectrum(self, seen: Seen | None, shared: dict[Any, Any]) -> dict[str, Any]:
        if seen is None or self.rank_threshold is None:
            return {"rank": None, "rank_threshold": None}
        if "rank" not in shared:
            values = native.eigvalsh(seen.hessian, threads=self.threads)
            shared["rank"] = int((values > self.rank_threshold * values[-1]).sum())
        return {"rank": shared["rank"], "rank_threshold": self.rank_threshold}

    def _solve(self, task: Task, seen: Seen | None, shared: dict[Any, Any]) -> QuantizedLayer:
        weight = oriented(self.weight(task.parameter), task.parameter)
        problem = Problem(
            name=task.parameter.name,
            weight=weight,
            hessian=seen.hessian if seen else None,
            config=task.config,
            orientation=task.parameter.orientation,
            threads=self.threads,
            shared=shared,
            metric=self.metrics.get(task.parameter.name),
        )
        layer = solve_rotated(problem)
        return layer.with_report(**account(task, layer, weight, seen, self.threads))

    def clear(self) -> None:
        """Remove the work folder."""
        if self.work:
            remove_own(self.work)


def step_weighting(
    acc: StepSource,
    task: Task,
    load: Callable[[], NDArray[np.float32]],
    metric: LoopMetric | None,
    threads: int,
) -> Weighting | None:
    """Weights of a task's steps as its settings ask for, or None where the plain sum is meant."""
    spec = parse_step_weights(task.config.step_weights)
    if spec == "sum":
        return None
    if isinstance(spec, Fraction):
        return alpha_weights(spec, len(task.steps))
    if spec == "trace":
        return trace_weights(acc, task.steps)
    if spec == "balanced":
        return balanced_weights(acc, task.steps)
    if spec == "validated":
        raise ConfigError(
            f"layer {task.parameter.name}: step_weights 'validated' are chosen for a whole run by `quantize`, which "
            "holds prompts back; they cannot stand in an override or go with a dump"
        )
    weight = load()

    def attempt(method: str, hessian: NDArray[np.float64] | None) -> NDArray[np.float32]:
        problem = Problem(
            task.parameter.name,
            weight,
            hessian,
            task.config,
            task.parameter.orientation,
            threads,
            {},
            metric=metric,
        )
        return QUANTIZERS.get(method)(problem).dequantize()

    rounded = attempt("rtn", None)
    if spec == "loss":
        return loss_weights(acc, task.steps, weight, rounded, threads)

    def solve(hessian: NDArray[np.float64]) -> NDArray[np.float32]:
        return attempt(task.config.method, hessian)

    return minimax_weights(acc, task.steps, weight, rounded, solve, threads)


@dataclass(frozen=True)
class Seen:
    """What an input group saw over the steps chosen."""

    hessian: NDArray[np.float64]
    rows: dict[int, int]
    weights: list[float] | None


def _groups(tasks: Sequence[Task]) -> list[list[Task]]:
    """Tasks that share input and steps stand together; the others alone. Order of first appearance."""
    groups: dict[tuple[Any, ...], list[Task]] = {}
    for task in tasks:
        key = (
            (task.leader, task.steps, task.config.step_weights)
            if task.leader
            else (None, task.parameter.name)
        )
        groups.setdefault(key, []).append(task)
    return list(groups.values())


def oriented(stored: RawTensor, parameter: SharedParameter) -> NDArray[np.float32]:
    """Return a stored weight in float32, outputs first.

    Raises
    ------
    NonFiniteError
        NaN or infinity, with its place.
    """
    weight = stored.float32()
    if parameter.orientation == "in_out":
        weight = weight.T
    weight = np.ascontiguousarray(weight)
    if not np.isfinite(weight).all():
        row, column = (int(i) for i in np.argwhere(~np.isfinite(weight))[0])
        raise NonFiniteError(
            f"layer {parameter.name}: weight[{row}, {column}] is {weight[row, column]}; the stored model is "
            "damaged or overflowed: convert it again from its source"
        )
    return weight


def _relative_error(value: NDArray[np.float32], target: NDArray[np.float32]) -> float:
    """||value - target||_F / ||target||_F, 0 for a zero target that is met."""
    return float(np.linalg.norm(value - target)) / max(float(np.linalg.norm(target)), 1e-30)


def solve_rotated(problem: Problem) -> QuantizedLayer:
    """Quantize a layer in the rotated basis that its settings ask for, or as it is.

    Notes
    -----
    H' = R H R^T and W' = W R^T are handed to the quantizer; R goes with the layer.
    """
    method = QUANTIZERS.get(problem.config.method)
    config = problem.config
    rotation = parse_rotation(config.rotation, problem.weight.shape[1], config.rotation_seed)
    if rotation is None:
        return method(problem)
    key = ("rotated", config.rotation, config.rotation_seed)
    if key not in problem.shared:
        turned = None if problem.hessian is None else rotation.conjugate(problem.hessian)
        problem.shared[key] = (turned, {})
    hessian, shared = problem.shared[key]
    layer = method(
        dataclasses.replace(
            problem,
            weight=rotation.fold(problem.weight),
            goal=None if problem.goal is None else rotation.fold(problem.goal),
            hessian=hessian,
            shared=shared,
            metric=None if problem.metric is None else problem.metric.rotated(rotation),
        )
    )
    if layer.transform is not None:
        raise ConfigError(
            f"layer {problem.name}: method {config.method!r} cannot be combined with a rotation"
        )
    return layer.with_transform(rotation).with_report(rotation=rotation.describe())


def account(
    task: Task, layer: QuantizedLayer, weight: NDArray[np.float32], seen: Seen | None, threads: int
) -> dict[str, Any]:
    """What the report says of a layer besides what its quantizer says."""
    config = task.config
    facts: dict[str, Any] = {
        "method_asked": config.method,
        "bits": config.bits,
        "group_size": config.group_size,
        "damping": config.damping if seen else None,
        "damping_kind": config.damping_kind if seen else None,
        "step_weighting": config.step_weights if seen else None,
        "step_weights": seen.weights if seen else None,
        "role": task.parameter.role,
        "exposed": task.parameter.exposed,
        "shape": list(layer.shape),
        "n_weights": int(weight.size),
        "n_bytes": layer.n_bytes,
        "steps": list(task.steps) if seen else [],
        "n_rows": sum(seen.rows.values()) if seen else 0,
        "weight_error": _relative_error(layer.dequantize(), weight),
    }
    if seen is None:
        return facts | {"reason": task.parameter.reason, "proxy": None, "proxy_rtn": None}
    plain = QUANTIZERS.get("rtn")(
        Problem(layer.name, weight, None, config, task.parameter.orientation, threads, {})
    )
    total = native.proxy(weight, None, seen.hessian, threads=threads)
    return facts | {
        # Of the inputs themselves: what a quantizer is given may be damped or rotated already.
        "n_dead_columns": int((np.diag(seen.hessian) == 0).sum()),
        "proxy": native.proxy(weight, layer.dequantize(), seen.hessian, threads=threads),
        "proxy_rtn": native.proxy(weight, plain.dequantize(), seen.hessian, threads=threads),
        "proxy_total": total,
    }


def tasks_of(
    parameters: Sequence[SharedParameter], leaders: dict[str, str], config: QuantConfig
) -> tuple[list[Task], list[SharedParameter]]:
    """Read the settings of every parameter.

    Returns
    -------
    tasks : list of Task
        Layers to quantize.
    dense : list of SharedParameter
        Layers left as they are.

    Raises
    ------
    ConfigError
        A method that does not exist, steps that do not exist, an override that matches nothing.
    """
    for override in config.overrides:
        if not any(override.matches(p.name) for p in parameters):
            raise ConfigError(
                f"override {override.pattern!r} matches no shared parameter; there are: "
                + ", ".join(p.name for p in parameters)
            )
    tasks, dense = [], []
    for p in parameters:
        layer_config, steps = config.for_layer(p.name)
        if p.treatment == "dense" or layer_config.method == "dense":
            dense.append(p)
            continue
        if p.treatment == "rtn":
            tasks.append(Task(p, _as_rtn(layer_config), (), None))
            continue
        needs = QUANTIZERS.get(layer_config.method).needs_hessian
        if needs and layer_config.metric == "loop" and layer_config.method != "full":
            raise ConfigError(
                f"layer {p.name}: metric 'loop' goes with method 'full'; got method {layer_config.method!r}"
            )
        leader = leaders.get(p.name) if needs else None
        tasks.append(Task(p, layer_config, tuple(parse_steps(steps, p.invocations)), leader))
    return tasks, dense


def _as_rtn(config: LayerConfig) -> LayerConfig:
    return dataclasses.replace(config, method="rtn", metric="inputs")
