"""Collect loop metrics: gradients of drawn labels through the unrolled loop, summed on either side of a weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.data import TokenSet
from loopq.calibrate.hessians import Hessians
from loopq.errors import ConfigError, NonFiniteError, SystemContractError
from loopq.gradients.scores import draw_labels
from loopq.gradients.threads import OneThread
from loopq.gradients.unroll import linked, unroll
from loopq.quantizers.loop_metric import (
    BLOCK,
    DAMPING,
    RIDGE,
    LoopMetric,
    inverse,
    n_gradient_prompts,
    ridged,
)
from loopq.quantizers.task import Task
from loopq.settings.execution import Execution
from loopq.storage.files import RawTensor
from loopq.storage.journal import Journal, Snapshots
from loopq.storage.weights import outputs_first
from loopq.systems.base import Batch, LoopedSystem, model_code

if TYPE_CHECKING:
    from torch import Tensor

Matrix = NDArray[np.float64]

#: Gradients that take no more than this are kept between the two rounds instead of being computed twice.
KEPT_BYTES = 1 << 30


@dataclass(frozen=True)
class MetricCost:
    """What the collection of loop metrics takes.

    Parameters
    ----------
    n_gradients : int
        Backward passes, those of the second round included.
    n_draws : int
        Of these, of one prompt and round.
    multiply_adds : float
        Double-precision products of all gradients with the matrices beside them.
    memory : int
        Bytes of those matrices, and of the gradients that are kept.
    """

    n_gradients: int
    n_draws: int
    multiply_adds: float
    memory: int


def metric_cost(tasks: Sequence[Task], n_prompts: int, memory: int | None = None) -> MetricCost:
    """Say what `collect_metrics` will take of that many prompts; all zero where no layer asks for a loop metric.

    `memory` is the limit of the run.
    """
    (most, n_draws), chosen = _chosen(tasks)
    if not chosen:
        return MetricCost(0, 1, 0.0, 0)
    n_prompts = n_gradient_prompts(most, n_prompts)
    shapes = [(t.parameter.out_features, t.parameter.in_features) for t in chosen]
    total = n_prompts * n_draws
    kept = _gradient_bytes(chosen, total)
    products = sum(2.0 * rows * columns * (columns + min(BLOCK, rows)) for rows, columns in shapes)
    held = sum(8 * (2 * columns**2 + 2 * rows * min(BLOCK, rows)) for rows, columns in shapes)
    rounds = 1 if kept <= _kept_limit(memory) else 2
    # Of each weight a copy, its gradient, and that in double precision.
    held += 16 * sum(rows * columns for rows, columns in shapes)
    return MetricCost(rounds * total, n_draws, products * total, held + (kept if rounds == 1 else 0))


def _chosen(tasks: Sequence[Task]) -> tuple[tuple[int | None, int], list[Task]]:
    """Layers that ask for a loop metric; most prompts and draws for each, which must be the same for all."""
    chosen = [t for t in tasks if t.gradients]
    asked = {t.gradients for t in chosen if t.gradients}
    if len(asked) > 1:
        raise ConfigError(
            "metric_prompts and metric_draws must be the same for all layers that have a loop metric"
        )
    return next(iter(asked), (0, 0)), chosen


def _kept_limit(memory: int | None) -> int:
    return KEPT_BYTES if memory is None else min(KEPT_BYTES, memory // 4)


def _gradient_bytes(tasks: Sequence[Task], total: int) -> int:
    """Bytes of all gradients of some layers, in float32."""
    return 4 * total * sum(t.parameter.in_features * t.parameter.out_features for t in tasks)


def draws(
    system: LoopedSystem,
    tokens: TokenSet,
    names: Sequence[str],
    n_steps: int,
    seed: int,
    n_draws: int,
    skip: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Yield gradients with respect to shared weights, one for each prompt and draw.

    Parameters
    ----------
    system : LoopedSystem
        Full-precision model.
    tokens : TokenSet
        Prompts.
    names : sequence of str
        Parameters.
    n_steps : int
        Depth.
    seed : int
        Seed of initial states and draws.
    n_draws : int
        Draws for each prompt.
    skip : int
        Prompts at the start that are left out.

    Notes
    -----
    Logits: the log-likelihood of labels drawn from the model's own distribution, at the positions that are scored.
    Hidden states: the product with normal noise, the same thing for a square error.
    """
    import torch  # lazy: loopq imports without torch

    for batch in islice(tokens.batches(1, seed), skip, None):
        leaves = {n: system.model.get_parameter(n).detach().clone().requires_grad_(True) for n in names}
        with linked(system, leaves), model_code(f"gradient of prompt {batch.prompts[0]}"):
            out = tokens.scored(unroll(system, batch, n_steps).float(), system.output)
            for number in range(n_draws):
                target = _target(system, out, batch, [seed, batch.prompts[0], number])
                grads = torch.autograd.grad(
                    target, [leaves[n] for n in names], retain_graph=number + 1 < n_draws, allow_unused=True
                )
                found = dict(zip(names, grads, strict=True))
                for name, grad in found.items():
                    if grad is not None and not bool(torch.isfinite(grad).all()):
                        raise NonFiniteError(f"layer {name}: the loop's gradient is NaN or infinite")
                yield {n: g for n, g in found.items() if g is not None}


def _target(system: LoopedSystem, out: Tensor, batch: Batch, seed: list[int]) -> Tensor:
    import torch  # lazy: loopq imports without torch

    if system.output == "logits":
        logp = out.log_softmax(-1)
        labels = draw_labels(logp.detach().cpu().numpy(), seed)
        return logp.gather(-1, system.to_device(torch.from_numpy(labels))[..., None]).sum()
    noise = np.random.default_rng(seed).standard_normal(tuple(out.shape)).astype(np.float32)
    return (out * system.to_device(torch.from_numpy(noise))).sum()


def collect_metrics(
    hessians: Hessians,
    system: LoopedSystem,
    tokens: TokenSet,
    tasks: Sequence[Task],
    n_steps: int,
    execution: Execution,
    journal: Journal,
) -> dict[str, LoopMetric]:
    """Collect the loop metric of every layer that asks for one.

    Parameters
    ----------
    hessians : Hessians
        Hessians of the layers' inputs.
    system : LoopedSystem
        Full-precision model.
    tokens : TokenSet
        Calibration prompts.
    tasks : sequence of Task
        Layers of the run.
    n_steps : int
        Depth.
    execution : Execution
        Seed of initial states and draws; progress.
    journal : Journal
        Where the sums are saved now and then, so that a killed run can be resumed. Gradients that are kept in memory
        are lost whole.

    Returns
    -------
    dict of str to LoopMetric
        By parameter name; without experts that no gradient reaches.

    Raises
    ------
    SystemContractError
        No gradient reaches a layer.

    Notes
    -----
    A needs H alone, S needs A: the prompts are run twice, unless all gradients fit in `KEPT_BYTES`. Sums are double
    precision; the same number of threads gives the same bits, another number may change last bits.
    """
    (most, n_draws), chosen = _chosen(tasks)
    chosen = [t for t in chosen if not t.parameter.routed_in or _n_rows(hessians, t)]
    if not chosen:
        return {}
    tokens = tokens.take(0, n_gradient_prompts(most, len(tokens.sequences)))
    names = [t.name for t in chosen]
    threads = OneThread()
    source = _Gradients(system, tokens, chosen, n_steps, n_draws, execution)
    sums = _Sums(journal)
    sums.resume()
    source.start(sums.round * source.total + sums.done)
    if sums.round == 0:
        inverses = {t.name: _inverse(_summed(hessians, t), DAMPING, threads) for t in chosen}
        for number, found in source.each(sums.done):
            for name, g in found:
                with threads.where_small(min(len(g), BLOCK) * g.shape[1] ** 2):
                    blocks = [g[b] @ inverses[name] @ g[b].T for b in _blocks(len(g))]
                sums.add_left(name, blocks)
            source.snapshot(sums, number)
        # An expert that was given no row has no gradient, or one of zeros.
        for t in chosen:
            if t.parameter.routed_in and not any(a.any() for a in sums.left.get(t.name, ())):
                sums.left.pop(t.name, None)
            elif t.name not in sums.left:
                raise SystemContractError(f"no gradient reaches {t.name}: use metric 'inputs' there")
        sums.begin_round(1)
    if sums.round == 1:
        back = {n: [_inverse(a, RIDGE, threads) for a in blocks] for n, blocks in sums.left.items()}
        for number, found in source.each(sums.done):
            for name, g in found:
                for b, a in zip(_blocks(len(g)), back.get(name, ()), strict=name in back):
                    with threads.where_small(min(len(g), BLOCK) * g.shape[1] ** 2):
                        add = g[b].T @ a @ g[b]
                    sums.add_right(name, add)
            source.snapshot(sums, number)
        sums.begin_round(2)
        sums.save()
    execution.progress.stop()
    left = {n: tuple(ridged(a, RIDGE) for a in sums.left[n]) for n in names if n in sums.left}
    return {n: LoopMetric(left[n], sums.right[n], source.total) for n in left}


def _n_rows(hessians: Hessians, task: Task) -> int:
    found = hessians.accumulator(str(task.input_group), task.steps)
    return sum(found.n_rows(step) for step in task.steps)


def _summed(hessians: Hessians, task: Task) -> Matrix:
    found = hessians.accumulator(str(task.input_group), task.steps)
    return np.asarray(found.matrix(list(task.steps)), dtype=np.float64)


@dataclass
class _Sums:
    """Sums of gradients on either side of each weight, saved so that a killed run can be resumed.

    Double-precision sums are stored as they are and prompts are added in one order: a resumed run has the same bits.
    """

    journal: Journal
    left: dict[str, list[Matrix]] = field(default_factory=dict)
    right: dict[str, Matrix] = field(default_factory=dict)
    round: int = 0
    done: int = 0
    snapshots: Snapshots = field(default_factory=Snapshots)

    def add_left(self, name: str, blocks: list[Matrix]) -> None:
        """Add to the blocks between outputs."""
        old = self.left.get(name)
        self.left[name] = blocks if old is None else [x + y for x, y in zip(old, blocks, strict=True)]

    def add_right(self, name: str, matrix: Matrix) -> None:
        """Add to the matrix between inputs."""
        self.right[name] = self.right[name] + matrix if name in self.right else matrix

    def begin_round(self, number: int) -> None:
        """Go on to the next round, with no gradient of it done."""
        self.round, self.done = number, 0

    def due(self) -> bool:
        """Whether it is time to save again."""
        return self.journal.folder is not None and self.snapshots.due()

    def save(self) -> None:
        """Save the sums, whole."""
        tensors = {f"left/{n}/{i:05d}": a for n, blocks in self.left.items() for i, a in enumerate(blocks)}
        tensors |= {f"right/{n}": a for n, a in self.right.items()}
        arrays = {n: RawTensor.of(a) for n, a in tensors.items()}
        with self.snapshots.saving():
            self.journal.save("sums", arrays, round=self.round, done=self.done)

    def resume(self) -> None:
        """Take over saved sums of the same work, if there are any."""
        found = self.journal.find("sums")
        if found is None:
            return
        self.round, self.done = int(found.facts["round"]), int(found.facts["done"])
        for name, tensor in sorted(found.tensors.items()):
            side, _, rest = name.partition("/")
            values = np.asarray(tensor.array(), dtype=np.float64)
            if side == "right":
                self.right[rest] = values
            else:
                self.left.setdefault(rest.rpartition("/")[0], []).append(values)


def _inverse(matrix: Matrix, share: float, threads: OneThread) -> Matrix:
    with threads.where_small(len(matrix) ** 3):
        return inverse(matrix, share)


@dataclass
class _Gradients:
    """Gradients of all draws, to be gone through twice: kept in between where they fit."""

    system: LoopedSystem
    tokens: TokenSet
    tasks: Sequence[Task]
    n_steps: int
    n_draws: int
    execution: Execution

    def __post_init__(self) -> None:
        self.total = len(self.tokens.sequences) * self.n_draws
        kept = _gradient_bytes(self.tasks, self.total)
        self._keep = kept <= _kept_limit(self.execution.memory)
        self._kept: list[dict[str, Tensor]] = []

    def start(self, done: int) -> None:
        """Begin the stage; `done` gradients of both rounds were summed before."""
        total = self.total * (1 if self._keep else 2)
        self.execution.progress.start("metric", total, "gradients")
        if done:
            self.execution.progress.note(f"resumed after {min(done, total)} gradients")
            self.execution.progress.advance(min(done, total))

    def snapshot(self, sums: _Sums, number: int) -> None:
        """Keep the sums after `number` gradients of this round, now and then and after whole prompts."""
        if not self._keep and number % self.n_draws == 0 and sums.due():
            sums.done = number
            sums.save()

    def each(self, done: int) -> Iterator[tuple[int, list[tuple[str, NDArray[np.float64]]]]]:
        """Yield gradients after the first `done`, outputs first, each with how many there were by then."""
        stored = {t.parameter.name: t.parameter.orientation for t in self.tasks}
        fresh = list(self._kept) or self._fresh(list(stored), done // self.n_draws)
        for number, found in enumerate(fresh, start=done + 1):
            yield (
                number,
                [(n, outputs_first(g.detach().double().cpu().numpy(), stored[n])) for n, g in found.items()],
            )

    def _fresh(self, names: list[str], skip: int) -> Iterator[dict[str, Tensor]]:
        for found in draws(
            self.system, self.tokens, names, self.n_steps, self.execution.seed, self.n_draws, skip
        ):
            if self._keep:
                self._kept.append(found)
            yield found
            self.execution.progress.advance()


def _blocks(rows: int) -> list[slice]:
    return [slice(i, min(rows, i + BLOCK)) for i in range(0, rows, BLOCK)]
