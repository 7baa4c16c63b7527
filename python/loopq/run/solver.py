"""Quantize every layer of a run from collected Hessians, one input group after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.calibrate.hessians import Hessians
from loopq.errors import CheckpointError, naming
from loopq.layers.layer import LayerSettings, QuantizedLayer
from loopq.layers.reader import TensorReader
from loopq.quantizers.base import Problem, has_twins
from loopq.quantizers.config import quantize_all
from loopq.quantizers.loop_metric import LoopMetric
from loopq.quantizers.task import Metrics, Task
from loopq.run.memory import solve_bytes
from loopq.run.plan import rounding_like
from loopq.run.step_weights import WeightedHessian, step_weights, weighted
from loopq.settings.execution import Execution, available_bytes
from loopq.storage.journal import Journal
from loopq.storage.schema import Object, checked
from loopq.storage.weights import ModelWeights

#: Maximum rows of a weight for the losses of a report. They take less than a tenth of a sweep of GPTQ.
REPORTED_ROWS = 32
#: Rows that are solved together on a device. Fewer rows leave a GPU idle, and more rows delay the saves.
ROWS_TOGETHER = 1 << 17


@dataclass(frozen=True)
class Solver:
    """Solver of the tasks of a run.

    Parameters
    ----------
    weights : ModelWeights
        Stored weights of the model.
    hessians : Hessians
        Hessians of the input groups.
    execution : Execution
        Threads and progress.
    rank_threshold : float or None
        Threshold of the rank in the report, relative to the largest eigenvalue. With None no rank is computed.
    metrics : Metrics
        Loop metrics of the layers that have one.
    journal : Journal
        Journal of solved layers. A killed run resumes from it.
    device : str
        The model's device.
    """

    weights: ModelWeights
    hessians: Hessians
    execution: Execution = field(default_factory=Execution)
    rank_threshold: float | None = None
    metrics: Metrics = field(default_factory=dict)
    journal: Journal = field(default_factory=lambda: Journal(None))
    device: str = "cpu"

    def run(self, tasks: Sequence[Task]) -> dict[str, QuantizedLayer]:
        """Solve all tasks and return the layers by parameter name, in the order of the tasks."""
        progress = self.execution.progress
        progress.start("solve", len(tasks), "layers")
        solved: dict[str, QuantizedLayer] = {}
        for group in together(tasks, self.device, self.execution.memory):
            for layer, new in self.each(group):
                solved[layer.name] = save_layer(self.journal, layer) if new else layer
                progress.advance()
        progress.stop()
        apart = sum(layer.report.get("solved_on") == "cpu" for layer in solved.values())
        if apart:
            progress.note(
                f"{apart} of {len(solved)} layers were solved on the CPU: their method or grid has no solver on "
                f"{self.device}"
            )
        return {t.name: solved[t.name] for t in tasks}

    def each(self, tasks: Sequence[Task]) -> Iterator[tuple[QuantizedLayer, bool]]:
        """Yield layers in whole groups, and whether each was solved now or saved before.

        The CPU solves them one by one. Devices with twins of the solvers, and methods that fold, solve them together.
        """
        shared: dict[Any, _Shared] = {}
        folds = any(t.config.method.folds for t in tasks)
        for group in [tasks] if folds or has_twins(self.device) else [[t] for t in tasks]:
            saved = {t.name: saved_layer(self.journal, t.name) for t in group}
            if folds and None in saved.values():
                saved = dict.fromkeys(saved)
            yield from ((layer, False) for layer in saved.values() if layer is not None)
            missing = [t for t in group if saved[t.name] is None]
            for layer in self._solve(
                [self._prepare(t, shared.setdefault(_group_of(t), _Shared())) for t in missing]
            ):
                yield layer, True

    def _prepare(self, task: Task, shared: _Shared) -> _Prepared:
        weight = self.weights.oriented(task.parameter)
        metric = self.metrics.get(task.metric_key)
        if task.input_group and shared.hessian is None:
            apart = task.step_weights != "sum"
            accumulator = self.hessians.accumulator(task.input_group, task.steps, per_step=apart)
            # The steps of an expert without rows have no weight.
            known = any(accumulator.n_rows(t) for t in task.steps)
            shared.hessian = weighted(accumulator, task, step_weights(accumulator, task) if known else None)
        summed = shared.hessian if task.input_group else None
        facts: Object = {}
        if summed and task.parameter.routed_in:
            facts = {"method_asked": task.config.method.name, "step_rows": list(summed.rows.values())}
            task = _as_routed(task, summed, metric)
            summed = summed if task.input_group else None
        hessian = summed.matrix if summed else None
        if metric is not None and hessian is not None and task.side == "inputs":
            hessian = shared.combined = (
                metric.combined(hessian) if shared.combined is None else shared.combined
            )
            facts |= {"metric": "loop", "metric_gradients": metric.n_gradients}
            task, metric = task.plain(), None
        problem = Problem(
            name=task.name,
            target=weight,
            hessian=hessian,
            settings=task.config.grid,
            orientation=task.parameter.orientation,
            threads=self.execution.threads,
            shared=shared.cache,
            metric=metric,
            device=self.device,
        )
        return _Prepared(task, problem, summed, facts)

    def _solve(self, prepared: Sequence[_Prepared]) -> Iterator[QuantizedLayer]:
        layers = quantize_all([(p.task.config, p.problem) for p in prepared])
        for (task, problem, summed, facts), layer in zip(prepared, layers, strict=True):
            with naming(task.name):
                rank = None if summed is None else self._rank(problem, summed)
                report = account(task, layer, problem.target, summed, problem.threads)
            yield layer.with_report(
                **report | facts, rank=rank, rank_threshold=None if rank is None else self.rank_threshold
            )

    def _rank(self, problem: Problem, summed: WeightedHessian) -> int | None:
        if self.rank_threshold is None:
            return None
        above = [self.rank_threshold]
        return problem.once("rank", lambda: native.count_above(summed.matrix, above, problem.threads)[1][0])


def _as_routed(task: Task, summed: WeightedHessian, metric: LoopMetric | None) -> Task:
    """Adapt an expert's task to its rows: rounding without rows, and no gradient metric without gradients."""
    if not sum(summed.rows.values()):
        reason = "no token of the calibration was sent to it"
        parameter = replace(task.parameter, reason=reason)
        return Task(parameter, task.config.changed(method=rounding_like(task.config)), (), None)
    if task.gradients and metric is None:
        return task.plain()
    return task


class _Prepared(NamedTuple):
    """A layer to solve, adapted to its rows, and the report about them."""

    task: Task
    problem: Problem
    summed: WeightedHessian | None
    facts: Object


@dataclass
class _Shared:
    """Data shared by the layers of one input group."""

    hessian: WeightedHessian | None = None
    combined: NDArray[np.float64] | None = None
    cache: dict[Any, Any] = field(default_factory=dict)


def together(tasks: Sequence[Task], device: str, memory: int | None) -> list[list[Task]]:
    """Return groups to solve together: single ones on the CPU, else similar ones within a quarter of the memory."""
    groups = groups_of(tasks)
    if not has_twins(device):
        return groups
    room = (memory or available_bytes() or 1 << 34) // 4
    batches: list[list[Task]] = [[]]
    for group in sorted(
        groups, key=lambda g: [(t.parameter.in_features, t.parameter.out_features) for t in g]
    ):
        both = [*batches[-1], *group]
        fits = sum(map(solve_bytes, both)) <= room
        fits &= sum(t.parameter.out_features for t in both) <= ROWS_TOGETHER
        batches[-1:] = [both] if fits or not batches[-1] else [batches[-1], group]
    return batches


def groups_of(tasks: Sequence[Task]) -> list[list[Task]]:
    """Group tasks with the same input, steps and weighting, in order of first appearance. Others stay alone."""
    groups: dict[tuple[Any, ...], list[Task]] = {}
    for task in tasks:
        groups.setdefault(_group_of(task), []).append(task)
    return list(groups.values())


def _group_of(task: Task) -> tuple[Any, ...]:
    return (task.input_group, task.steps, task.step_weights) if task.input_group else (None, task.name)


def save_layer(journal: Journal, layer: QuantizedLayer, part: str = "") -> QuantizedLayer:
    """Save a solved layer and return it with its codes on disk. `part` separates layers of the same name."""
    journal.save(f"{part}{layer.name}", layer.tensors(), settings=layer.settings(), report=dict(layer.report))
    return _shelved(journal, layer)


def _shelved(journal: Journal, layer: QuantizedLayer) -> QuantizedLayer:
    return layer if journal.shelf is None else replace(layer, codes=journal.shelf.put(layer.codes))


def saved_layer(journal: Journal, name: str, part: str = "") -> QuantizedLayer | None:
    """Read a saved layer of this work; None if there is none."""
    piece = journal.find(f"{part}{name}")
    if piece is None:
        return None
    where = f"{journal.folder}, {name}"
    settings = checked(LayerSettings, piece.facts["settings"], where, CheckpointError)
    reader = TensorReader(where, piece.tensors)
    return _shelved(journal, QuantizedLayer.from_tensors(settings, reader, piece.facts["report"]))


def account(
    task: Task,
    layer: QuantizedLayer,
    weight: NDArray[np.float32],
    summed: WeightedHessian | None,
    threads: int,
) -> Object:
    """Return the report entries of a layer besides those of its quantizer."""
    config = task.config
    damping = getattr(config.method, "damping", None) if summed else None
    stored = layer.dequantize()
    facts: Object = {
        "method_asked": config.method.name,
        "bits": layer.grid.bits,
        "group_size": layer.grid.group_size,
        "damping": damping.fraction if damping else None,
        "damping_kind": damping.kind if damping else None,
        "step_weighting": task.step_weights if summed else None,
        "step_weights": summed.weights if summed else None,
        "role": task.parameter.role,
        "exposed": task.parameter.exposed,
        "shape": list(layer.shape),
        "n_weights": int(weight.size),
        "n_bytes": layer.n_bytes,
        "steps": list(task.steps) if summed else [],
        "n_rows": sum(summed.rows.values()) if summed else 0,
        "weight_error": relative_error(stored, weight),
        **oddities(layer, weight),
    }
    if summed is None:
        return facts | {"reason": task.parameter.reason, "proxy": None, "proxy_rtn": None}
    # The Hessian of the inputs themselves. A quantizer's own may already be damped or rotated.
    hessian = summed.matrix
    rows = _reported(weight)
    part = np.ascontiguousarray(weight[rows])
    plain = rounding_like(config).quantize(Problem(layer.name, part, None, config.grid, threads=threads))
    return facts | {
        "n_dead_columns": int((np.diag(hessian) == 0).sum()),
        "proxy": loss_of(weight, stored, hessian, threads),
        "proxy_rtn": loss_of(part, plain.dequantize(), hessian, threads) * weight.shape[0] / part.shape[0],
        "proxy_total": loss_of(weight, None, hessian, threads),
        "proxy_rows": part.shape[0],
    }


def oddities(layer: QuantizedLayer, weight: NDArray[np.float32]) -> dict[str, int]:
    """Count nonzero groups that became zeros, and scales that float16 holds imprecisely."""
    scales, codes = np.abs(layer.scales), layer.codes
    counts = {}
    if layer.grid.plain and layer.transform is None and (scales == 1.0).any():
        size = layer.grid.group_size if layer.grid.group_size > 0 else codes.shape[1]
        starts = np.arange(0, codes.shape[1], size)
        largest = np.maximum.reduceat(np.abs(weight), starts, axis=1)
        became = np.maximum.reduceat(np.abs(layer.stored_values()), starts, axis=1)
        counts["n_zeroed_groups"] = int(((largest > 0) & (became == 0)).sum())
    if layer.grid.scale_dtype == "float16":
        counts["n_subnormal_scales"] = int((scales < np.finfo(np.float16).tiny).sum())
    # A layer without such cases keeps its report.
    return {name: count for name, count in counts.items() if count}


def _reported(weight: NDArray[np.float32]) -> slice:
    """Select every k-th row of a weight, at most `REPORTED_ROWS` rows."""
    return slice(None, None, -(-weight.shape[0] // REPORTED_ROWS))


def loss_of(
    weight: NDArray[np.float32],
    stored: NDArray[np.float32] | None,
    hessian: NDArray[np.float64],
    threads: int,
) -> float:
    """``tr((W^ - W) H (W^ - W)^T)`` for a report, from every k-th row of a weight with more than `REPORTED_ROWS` rows.

    Over all rows it takes as long as a sweep of GPTQ. None stands for zero.
    """
    rows = _reported(weight)
    part = np.ascontiguousarray(weight[rows])
    other = None if stored is None else np.ascontiguousarray(stored[rows])
    return float(native.proxy(part, other, hessian, threads=threads) * weight.shape[0] / part.shape[0])


def relative_error(value: NDArray[np.float32], target: NDArray[np.float32]) -> float:
    """||value - target||_F / ||target||_F; 0 if both are zero."""
    return float(np.linalg.norm(value - target)) / max(float(np.linalg.norm(target)), 1e-30)
