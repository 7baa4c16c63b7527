"""Collect loop metrics: gradients of drawn labels through the unrolled loop, summed on both sides of a weight."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.data import TokenSet
from loopq.calibrate.hessians import Hessians
from loopq.errors import ConfigError, SystemContractError
from loopq.gradients.backward import Backward
from loopq.models.replace import stored_weight
from loopq.quantizers.loop_metric import BLOCK, DAMPING, RIDGE, LoopMetric, n_gradient_prompts
from loopq.quantizers.task import Task
from loopq.settings.execution import Execution
from loopq.storage.files import RawTensor
from loopq.storage.journal import Journal, Snapshots
from loopq.systems.base import LoopedSystem

if TYPE_CHECKING:
    from torch import Tensor

    from loopq.gradients.sketch import Side

#: Total columns of all prompts' thin matrices per output of a block; and maximum columns of one matrix.
COLUMNS, MOST = 8, 256
#: Share of the prompts that run ahead for the scale of each output; and the least scale as a share of the mean.
AHEAD, LEAST_SCALE = 0.125, 0.1
#: Replaces zero before a division in single precision.
_TINY = 1e-30


def rank_of(n_prompts: int) -> int:
    """Columns of a gradient's thin matrix. More prompts need fewer columns each."""
    return min(MOST, -(-COLUMNS * BLOCK // n_prompts))


def n_ahead(n_prompts: int) -> int:
    """Number of prompts that run ahead."""
    return math.ceil(AHEAD * n_prompts)


@dataclass(frozen=True)
class MetricCost:
    """Cost of the collection of loop metrics.

    Parameters
    ----------
    n_gradients : int
        Backward passes, including those that run ahead.
    n_draws : int
        Backward passes of one prompt. Each has its own labels.
    multiply_adds : float
        Single-precision products of all gradients with thin matrices.
    memory : int
        Bytes of the sums and of the matrices beside them, during the collection.
    kept : int
        Bytes of the metrics, which the solves read.
    """

    n_gradients: int
    n_draws: int
    multiply_adds: float
    memory: int
    kept: int


def metric_cost(
    tasks: Sequence[Task], tokens: TokenSet, at_once: int = 1, shares: Mapping[str, float] | None = None
) -> MetricCost:
    """Estimate the cost of `collect_metrics` for some prompts. It is zero if no layer has a loop metric.

    Products of `at_once` prompts that run in turns are held until all have ended. Experts get `shares` of the tokens.
    """
    (most, n_draws), chosen = _chosen(tasks)
    if not chosen:
        return MetricCost(0, 1, 0.0, 0, 0)
    n_prompts = n_gradient_prompts(most, len(tokens.sequences))
    n_tokens = tokens.take(0, n_prompts).n_tokens
    rank, total = rank_of(n_prompts), n_prompts * n_draws
    waiting = min(at_once, n_prompts) * n_draws if at_once > 1 else 1
    products, kept, n_columns = 0.0, 0, _columns(chosen, n_prompts)
    # Layers of one input and equal steps share a root on the inputs' side.
    roots = {(t.input_group, t.steps): t for t in chosen}.values()
    memory = sum(4 * w * min(w, n_columns[t.metric_name]) for t in roots if (w := t.parameter.in_features))
    counted: set[str] = set()
    for t in chosen:
        p, first = t.parameter, t.metric_name not in counted
        counted.add(t.metric_name)
        wide, high, block = p.in_features, p.out_features, min(BLOCK, p.out_features)
        rows = n_tokens * p.invocations * (shares or {}).get(t.name, 1.0)
        right = wide**2 * (first and t.side != "outputs")
        left = high * block * (first and t.side != "inputs")
        products += rank * (rows * (wide + n_draws * (2 * high + wide)) + total * right)
        products += rank * total * left * (1 + rank / block)
        # Thin matrices and products. Experts add theirs to one product.
        memory += 4 * (left + right) + 4 * rank * (high + wide) * (1 + waiting * first)
        kept += 4 * (left + right)
    # A root's damped matrix, its factor, and the solution.
    memory += 24 * max(t.parameter.in_features for t in chosen) ** 2
    return MetricCost(total + n_ahead(n_prompts) * n_draws, n_draws, products, memory, kept)


def _columns(tasks: Sequence[Task], n_prompts: int) -> Mapping[str, int]:
    """Columns of the roots of each sum, which all prompts take in turn. Experts that share a sum divide them."""
    members = Counter(t.metric_name for t in tasks if t.side == "outputs")
    rank = rank_of(n_prompts)
    return {t.metric_name: max(rank, -(-n_prompts * rank // (members[t.metric_name] or 1))) for t in tasks}


def _chosen(tasks: Sequence[Task]) -> tuple[tuple[int | None, int], list[Task]]:
    """Return maximum prompts and draws, which must be the same for all, and the layers with a loop metric."""
    chosen = [t for t in tasks if t.gradients]
    asked = {t.gradients for t in chosen if t.gradients}
    if len(asked) > 1:
        raise ConfigError(
            "metric_prompts and metric_draws must be the same for all layers that have a loop metric"
        )
    return next(iter(asked), (0, 0)), chosen


def collect_metrics(
    hessians: Hessians,
    system: LoopedSystem,
    tokens: TokenSet,
    tasks: Sequence[Task],
    n_steps: int,
    execution: Execution,
    journal: Journal,
) -> dict[str, LoopMetric]:
    """Collect the loop metric of every layer that has one.

    Parameters
    ----------
    hessians : Hessians
        Hessians of the layers' inputs.
    system : LoopedSystem
        Full-precision model. It runs forward and backward.
    tokens : TokenSet
        Calibration prompts.
    tasks : sequence of Task
        Layers of the run. Layers without a loop metric are skipped.
    execution : Execution
        Seed of initial states, draws and thin matrices; progress.
    journal : Journal
        Journal for periodic saves of the sums. A killed run resumes from it.

    Returns
    -------
    dict of str to LoopMetric
        Metrics by `Task.metric_name`. Experts that receive no gradient are missing.

    Raises
    ------
    SystemContractError
        No gradient reaches a layer.

    Notes
    -----
    Sums and products are in single precision, on the model's device (`loopq.gradients.sketch`). S needs the scale of
    each output. Some prompts run ahead and give these scales. The same number of threads gives the same bits. Another
    number may change the last bits.
    """
    (most, n_draws), chosen = _chosen(tasks)
    chosen = [t for t in chosen if not t.parameter.routed_in or _n_rows(hessians, t)]
    if not chosen:
        return {}
    tokens = tokens.take(0, n_gradient_prompts(most, len(tokens.sequences)))
    collector = _Collector(system, tokens, n_steps, n_draws, execution, _Sums(journal))
    return collector.run(chosen, hessians)


def reached(
    system: LoopedSystem, tokens: TokenSet, tasks: Sequence[Task], n_steps: int, seed: int
) -> set[str]:
    """Names of the layers that receive a gradient of the first prompt.

    Raises
    ------
    LoopqError
        There are no gradients, or they are not finite.
    """
    from loopq.gradients.sketch import Reached  # lazy: loopq imports without torch

    side = Reached()
    for _ in Backward(system, tokens, n_steps, 1, seed).run(side, tasks, 0, 1):
        pass
    return side.names


@dataclass
class _Collector:
    """Collector that runs some prompts ahead, then all of them."""

    system: LoopedSystem
    tokens: TokenSet
    n_steps: int
    n_draws: int
    execution: Execution
    sums: _Sums

    def __post_init__(self) -> None:
        self.n_prompts = len(self.tokens.sequences)
        self.rank = rank_of(self.n_prompts)
        how = self.execution
        self.backward = Backward(
            self.system, self.tokens, self.n_steps, self.n_draws, how.seed, how.batch_size
        )
        self._roots: dict[str, Tensor] = {}
        self._sizes: dict[str, Tensor] = {}

    def run(self, tasks: Sequence[Task], hessians: Hessians) -> dict[str, LoopMetric]:
        """Return the metrics of the layers that receive a gradient."""
        from loopq.gradients.sketch import Both, Outputs, Sketch  # lazy: loopq imports without torch

        sums, progress, ahead = self.sums, self.execution.progress, n_ahead(self.n_prompts)
        sums.resume(self.system)
        progress.start("metric", (ahead + self.n_prompts) * self.n_draws, "gradients")
        done = (sums.done + ahead * (sums.round > 0) + self.n_prompts * (sums.round > 1)) * self.n_draws
        if done:
            progress.note(f"resumed after {done} gradients")
            progress.advance(done)
        if sums.round < 2:
            self._read(tasks, hessians)
        pools = {t.name: t.pool for t in tasks if t.pool}
        sketch = Sketch(self._roots, self.rank, BLOCK, self.execution.seed, self.n_draws, pools)
        if sums.round == 0:
            self._round(Outputs(sums.energy, sketch), tasks, ahead)
        if sums.round == 1:
            self._round(
                Both(sums.left, sums.right, sums.spread, self._scales(), sketch), tasks, self.n_prompts
            )
        progress.stop()
        n_gradients = self.n_prompts * self.n_draws
        metrics = {}
        for name in self._reached(tasks):
            left = tuple(a.cpu().numpy() for a in sums.left.get(name, ()))
            right = sums.right.pop(name).cpu().numpy() if name in sums.right else np.zeros((0, 0), np.float32)
            metrics[name] = LoopMetric(left, right, n_gradients, RIDGE)
        return metrics

    def _round(self, side: Side, tasks: Sequence[Task], n_prompts: int) -> None:
        sums = self.sums
        with contextlib.closing(self.backward.run(side, tasks, sums.done, n_prompts)) as gradients:
            for done in gradients:
                if done > sums.done:
                    sums.done = done
                    if sums.snapshots.due():
                        sums.save()
                self.execution.progress.advance()
        side.finish(n_prompts * self.n_draws)
        sums.round, sums.done = sums.round + 1, 0
        if sums.round == 2:
            sums.save()

    def _read(self, tasks: Sequence[Task], hessians: Hessians) -> None:
        """Compute roots of the inverses of H', shared by layers with one input and equal steps, and sizes of rows."""
        import torch  # lazy: loopq imports without torch

        from loopq.gradients.sketch import root, seed_of

        by_input: dict[Any, tuple[Tensor, Tensor]] = {}
        n_columns = _columns(tasks, self.n_prompts)
        for task in tasks:
            p, key = task.parameter, (task.input_group, task.steps)
            if key not in by_input:
                hessian = _summed(hessians, task)
                seed = seed_of(str(task.input_group), self.execution.seed, 0)
                columns = min(p.in_features, n_columns[task.metric_name])
                whole = root(hessian, DAMPING, seed, columns, self.system.device)
                energy = torch.from_numpy(np.diag(hessian).astype(np.float32))
                by_input[key] = whole, self.system.to_device(energy)
            self._roots[task.name], energy = by_input[key]
            weight = p.matrix(stored_weight(self.system, p))
            size = weight.float().square() @ energy
            name = task.metric_name if task.side == "outputs" else task.name
            self._sizes[name] = self._sizes[name] + size if name in self._sizes else size

    def _scales(self) -> dict[str, Tensor]:
        """Factor of each output: one over the root of its energy d, which is raised if d r is far below its mean.

        Here r is the size of a row. Scaling a row up and its readers down changes nothing. An expert that receives no
        prompt ahead has d = 1 / r.
        """
        scales = {}
        for name, size in self._sizes.items():
            size = size.clamp_min(_TINY)
            relative = self.sums.energy[name] * size if name in self.sums.energy else size.new_ones(len(size))
            relative = relative.clamp_min(max(LEAST_SCALE * float(relative.mean()), _TINY))
            scales[name] = (size / relative).sqrt()
        return scales

    def _reached(self, tasks: Sequence[Task]) -> list[str]:
        """Return the names of the sums that a gradient reaches. Only experts may receive none."""
        left = []
        for name, task in {t.metric_name: t for t in tasks}.items():
            sums = self.sums.left.get(name) or [a for n, a in self.sums.right.items() if n == name]
            # An expert without rows has no gradient, or a zero gradient.
            if sums and not (task.parameter.routed_in and not any(a.any() for a in sums)):
                left.append(name)
            elif not task.parameter.routed_in:
                raise SystemContractError(f"no gradient reaches {name}: use metric 'inputs' there")
        return left


def _n_rows(hessians: Hessians, task: Task) -> int:
    accumulator = hessians.accumulator(str(task.input_group), task.steps)
    return sum(accumulator.n_rows(step) for step in task.steps)


def _summed(hessians: Hessians, task: Task) -> NDArray[np.float64]:
    accumulator = hessians.accumulator(str(task.input_group), task.steps)
    return np.asarray(accumulator.matrix(list(task.steps)), dtype=np.float64)


@dataclass
class _Sums:
    """Sums of gradients on both sides of each weight, saved so that a killed run can resume.

    Sums are stored exactly, and prompts are added in one order. Therefore a resumed run has the same bits.
    """

    journal: Journal
    energy: dict[str, Tensor] = field(default_factory=dict)
    left: dict[str, list[Tensor]] = field(default_factory=dict)
    right: dict[str, Tensor] = field(default_factory=dict)
    spread: dict[str, Tensor] = field(default_factory=dict)
    round: int = 0
    done: int = 0
    snapshots: Snapshots = field(default_factory=Snapshots)

    def save(self) -> None:
        """Save the complete sums and their number of prompts in this round."""
        if self.journal.folder is None:
            return
        tensors = {f"left/{n}/{i:05d}": a for n, blocks in self.left.items() for i, a in enumerate(blocks)}
        for side in ("right", "spread", "energy"):
            tensors |= {f"{side}/{n}": a for n, a in getattr(self, side).items()}
        arrays = {n: RawTensor.of(a.cpu().numpy()) for n, a in tensors.items()}
        with self.snapshots.saving():
            self.journal.save("sums", arrays, round=self.round, done=self.done)

    def resume(self, system: LoopedSystem) -> None:
        """Load saved sums of the same work, if there are any."""
        import torch  # lazy: loopq imports without torch

        piece = self.journal.find("sums")
        if piece is None:
            return
        self.round, self.done = int(piece.facts["round"]), int(piece.facts["done"])
        for name, tensor in sorted(piece.tensors.items()):
            side, _, rest = name.partition("/")
            values = system.to_device(torch.from_numpy(np.array(tensor.array(), dtype=np.float32)))
            if side == "left":
                self.left.setdefault(rest.rpartition("/")[0], []).append(values)
            else:
                getattr(self, side)[rest] = values
