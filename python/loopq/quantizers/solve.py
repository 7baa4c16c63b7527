"""Quantize every layer of a selection from collected Hessians, one input group after the other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.checkpoint.files import RawTensor, read_json, read_tensors, write_json, write_tensors
from loopq.checkpoint.layer import QuantizedLayer
from loopq.config import LayerConfig, QuantConfig, parse_steps
from loopq.errors import ConfigError, NonFiniteError
from loopq.progress import Progress, Silent
from loopq.quantizers import QUANTIZERS
from loopq.quantizers.base import Problem
from loopq.systems.base import SharedParameter


class Source(Protocol):
    """Where Hessians come from: accumulators in memory, or a dump."""

    def accumulator(self, leader: str, steps: Sequence[int]) -> native.HessianAccumulator:
        """Return the finished accumulator of an input group over the steps chosen."""


@dataclass(frozen=True)
class Task:
    """One layer, what is asked for it, and whom it shares its input with."""

    parameter: SharedParameter
    config: LayerConfig
    steps: tuple[int, ...]
    leader: str | None


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
    """

    weight: Callable[[SharedParameter], RawTensor]
    source: Source
    rank_threshold: float | None = 1e-3
    threads: int = 0
    work: Path | None = None
    key: str = ""
    progress: Progress = field(default_factory=Silent)

    def run(self, tasks: Sequence[Task], total: int | None = None) -> dict[str, QuantizedLayer]:
        """Solve all tasks; return the layers by parameter name, in the order of the tasks."""
        self.progress.start("solve", total or len(tasks), "layers")
        solved: dict[str, QuantizedLayer] = {}
        for group in _groups(tasks):
            solved.update(self._group(group))
        self.progress.stop()
        return {t.parameter.name: solved[t.parameter.name] for t in tasks}

    def _group(self, tasks: Sequence[Task]) -> dict[str, QuantizedLayer]:
        done = {t.parameter.name: self._resume(t) for t in tasks}
        if any(layer is None for layer in done.values()):
            lead = tasks[0]
            seen = _Seen.of(self.source.accumulator(lead.leader, lead.steps), lead) if lead.leader else None
            extra = self._spectrum(seen)
            shared: dict[Any, Any] = {}
            for task in tasks:
                if done[task.parameter.name] is None:
                    layer = self._solve(task, seen, shared).with_report(**extra)
                    self._keep(task, layer)
                    done[task.parameter.name] = layer
                self.progress.advance()
        else:
            self.progress.advance(len(tasks))
        return {name: layer for name, layer in done.items() if layer is not None}

    def _spectrum(self, seen: _Seen | None) -> dict[str, Any]:
        if seen is None or self.rank_threshold is None:
            return {"rank": None, "rank_threshold": None}
        values = native.eigvalsh(seen.hessian, threads=self.threads)
        rank = int((values > self.rank_threshold * values[-1]).sum())
        return {"rank": rank, "rank_threshold": self.rank_threshold}

    def _solve(self, task: Task, seen: _Seen | None, shared: dict[Any, Any]) -> QuantizedLayer:
        weight = oriented(self.weight(task.parameter), task.parameter)
        config = task.config
        method = QUANTIZERS.get(config.method)
        problem = Problem(
            name=task.parameter.name,
            weight=weight,
            hessian=seen.hessian if seen else None,
            config=config,
            orientation=task.parameter.orientation,
            threads=self.threads,
            shared=shared,
        )
        layer = method(problem)
        return layer.with_report(**_account(task, layer, weight, seen, self.threads))

    def _path(self, task: Task) -> Path | None:
        return self.work / "layers" / f"{task.parameter.name}.safetensors" if self.work else None

    def _keep(self, task: Task, layer: QuantizedLayer) -> None:
        path = self._path(task)
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

    def _resume(self, task: Task) -> QuantizedLayer | None:
        path = self._path(task)
        if path is None or not path.with_suffix(".json").is_file():
            return None
        journal = read_json(path.with_suffix(".json"))
        if journal["key"] != self.key:
            return None
        return QuantizedLayer.from_tensors(
            journal["settings"], read_tensors(path), journal["report"], str(path)
        )

    def clear(self) -> None:
        """Remove the work folder."""
        if self.work:
            shutil.rmtree(self.work, ignore_errors=True)


@dataclass(frozen=True)
class _Seen:
    """What an input group saw over the steps chosen."""

    hessian: NDArray[np.float64]
    rows: dict[int, int]

    @classmethod
    def of(cls, acc: native.HessianAccumulator, task: Task) -> _Seen:
        hessian = np.asarray(acc.matrix(list(task.steps)), dtype=np.float64)
        return cls(hessian, {t: acc.n_rows(t) for t in task.steps})


def _groups(tasks: Sequence[Task]) -> list[list[Task]]:
    """Tasks that share input and steps stand together; the others alone. Order of first appearance."""
    groups: dict[tuple[Any, ...], list[Task]] = {}
    for task in tasks:
        key = (task.leader, task.steps) if task.leader else (None, task.parameter.name)
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


def _account(
    task: Task, layer: QuantizedLayer, weight: NDArray[np.float32], seen: _Seen | None, threads: int
) -> dict[str, Any]:
    """What the report says of a layer besides what its quantizer says."""
    config = task.config
    account: dict[str, Any] = {
        "method_asked": config.method,
        "bits": config.bits,
        "group_size": config.group_size,
        "damping": config.damping if seen else None,
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
        return account | {"reason": task.parameter.reason, "proxy": None, "proxy_rtn": None}
    plain = QUANTIZERS.get("rtn")(
        Problem(layer.name, weight, None, config, task.parameter.orientation, threads, {})
    )
    zero = np.zeros_like(weight)
    total = native.proxy(weight, zero, seen.hessian, threads=threads)
    return account | {
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
        leader = leaders.get(p.name) if needs else None
        tasks.append(Task(p, layer_config, tuple(parse_steps(steps, p.invocations)), leader))
    return tasks, dense


def _as_rtn(config: LayerConfig) -> LayerConfig:
    return LayerConfig(**{**json.loads(json.dumps(vars(config))), "method": "rtn"})
