"""Collect loop metrics: gradients of drawn labels through the unrolled loop, summed on either side of a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.data import TokenSet
from loopq.errors import ConfigError, NonFiniteError, SystemContractError
from loopq.progress import Progress, Silent
from loopq.quantizers.metric import DAMPING, RIDGE, LoopMetric, inverse, ridged
from loopq.quantizers.solve import Source, Task
from loopq.systems.base import Batch, LoopedSystem
from loopq.threads import OneThread
from loopq.tune.unroll import linked, unroll

if TYPE_CHECKING:
    from torch import Tensor

Matrix = NDArray[np.float64]
Blocks = dict[str, list[Matrix]]

#: Gradients that take no more than this are kept between the two rounds instead of being computed twice.
KEPT_BYTES = 1 << 30
#: Rows of a weight that are coupled with each other.
BLOCK = 512


@dataclass(frozen=True)
class MetricCost:
    """What the collection of loop metrics takes.

    Parameters
    ----------
    n_gradients : int
        Backward passes, those of the second round included.
    multiply_adds : float
        Double-precision products of all gradients with the matrices beside them.
    memory : int
        Bytes of those matrices, and of the gradients that are kept.
    """

    n_gradients: int
    multiply_adds: float
    memory: int


def metric_cost(tasks: Sequence[Task], n_prompts: int, n_draws: int) -> MetricCost:
    """Say what `collect_metrics` will take; all zero where no layer asks for a loop metric.

    Parameters
    ----------
    tasks : sequence of Task
        Layers of the run.
    n_prompts : int
        Calibration prompts.
    n_draws : int
        Draws for each prompt.
    """
    shapes = [(t.parameter.out_features, t.parameter.in_features) for t in tasks if wanted(t)]
    if not shapes:
        return MetricCost(0, 0.0, 0)
    total = n_prompts * n_draws
    kept = 4 * sum(rows * columns for rows, columns in shapes) * total
    products = sum(2.0 * rows * columns * (columns + min(BLOCK, rows)) for rows, columns in shapes)
    held = sum(8 * (2 * columns**2 + 2 * rows * min(BLOCK, rows)) for rows, columns in shapes)
    rounds = 1 if kept <= KEPT_BYTES else 2
    return MetricCost(rounds * total, products * total, held + (kept if rounds == 1 else 0))


def wanted(task: Task) -> bool:
    """Whether a layer asks for a loop metric and is observed."""
    return task.config.metric == "loop" and task.leader is not None


def draws(
    system: LoopedSystem, tokens: TokenSet, names: Sequence[str], n_steps: int, seed: int, n_draws: int
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

    Notes
    -----
    Logits: the log-likelihood of labels drawn from the model's own distribution. Hidden states: the product with
    normal noise, the same thing for a square error.
    """
    import torch

    for batch in tokens.batches(1, seed):
        leaves = {n: system.model.get_parameter(n).detach().clone().requires_grad_(True) for n in names}
        with linked(system, leaves):
            out = unroll(system, batch, n_steps).float()
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
    import torch

    from loopq.tune.scores import draw_labels

    if system.output == "logits":
        logp = out.log_softmax(-1)
        labels = draw_labels(logp.detach().cpu().numpy(), seed)
        return logp.gather(-1, system.to_device(torch.from_numpy(labels))[..., None]).sum()
    noise = np.random.default_rng(seed).standard_normal(tuple(out.shape)).astype(np.float32)
    return (out * system.to_device(torch.from_numpy(noise))).sum()


def collect_metrics(
    system: LoopedSystem,
    tokens: TokenSet,
    tasks: Sequence[Task],
    hessian: Callable[[Task], NDArray[np.float64]],
    *,
    n_steps: int | None = None,
    seed: int = 0,
    n_draws: int = 4,
    progress: Progress | None = None,
) -> dict[str, LoopMetric]:
    """Collect the loop metric of every layer that asks for one.

    Parameters
    ----------
    system : LoopedSystem
        Full-precision model.
    tokens : TokenSet
        Calibration prompts.
    tasks : sequence of Task
        Layers; those whose settings say `metric = "loop"` and that are observed are taken.
    hessian : callable
        Task to its H.
    n_steps : int, optional
        Depth; the model's own when absent.
    seed : int
        Seed of initial states and draws.
    n_draws : int
        Draws for each prompt.
    progress : Progress, optional
        Told of draws.

    Returns
    -------
    dict of str to LoopMetric
        By parameter name.

    Raises
    ------
    SystemContractError
        No gradient reaches a layer.

    Notes
    -----
    A needs H alone, S needs A: the prompts are run twice, unless all gradients fit in `KEPT_BYTES`. Sums are double
    precision; the same number of threads gives the same bits, another number may change last bits.
    """
    chosen = [t for t in tasks if wanted(t)]
    if not chosen:
        return {}
    if n_draws < 1:
        raise ConfigError(f"metric_draws must be at least 1; got {n_draws!r}")
    depth = system.check_depth(n_steps if n_steps is not None else system.n_steps)
    names = [t.parameter.name for t in chosen]
    threads = OneThread()
    started = {t.parameter.name: _inverse(hessian(t), DAMPING, threads) for t in chosen}
    source = _Gradients(system, tokens, chosen, depth, seed, n_draws, progress or Silent())
    left = _between_outputs(source, started, threads)
    missing = [n for n in names if n not in left]
    if missing:
        raise SystemContractError(f"no gradient reaches {', '.join(missing)}: use metric 'inputs' there")
    metrics = {n: [ridged(a, RIDGE) for a in blocks] for n, blocks in left.items()}
    back = {n: [_inverse(a, RIDGE, threads) for a in blocks] for n, blocks in left.items()}
    right = _between_inputs(source, back, threads)
    source.progress.stop()
    return {n: LoopMetric(tuple(metrics[n]), right[n], source.total) for n in names}


def _inverse(matrix: Matrix, share: float, threads: OneThread) -> Matrix:
    with threads.where_small(len(matrix) ** 3):
        return inverse(matrix, share)


def _between_outputs(source: _Gradients, inverses: Mapping[str, Matrix], threads: OneThread) -> Blocks:
    """sum_n g_n H'^-1 g_n^T of each layer, blocks of outputs apart."""
    found: Blocks = {}
    for name, g in source.each():
        with threads.where_small(min(len(g), BLOCK) * g.shape[1] ** 2):
            sums = [g[b] @ inverses[name] @ g[b].T for b in _blocks(len(g))]
        found[name] = [x + y for x, y in zip(found[name], sums, strict=True)] if name in found else sums
    return found


def _between_inputs(source: _Gradients, inverses: Blocks, threads: OneThread) -> dict[str, Matrix]:
    """sum_n g_n^T A^-1 g_n of each layer, over all its blocks."""
    found: dict[str, Matrix] = {}
    for name, g in source.each():
        for b, a in zip(_blocks(len(g)), inverses[name], strict=True):
            with threads.where_small(min(len(g), BLOCK) * g.shape[1] ** 2):
                add = g[b].T @ a @ g[b]
            found[name] = found[name] + add if name in found else add
    return found


def loop_metrics(
    sums: Source,
    system: LoopedSystem,
    tokens: TokenSet,
    tasks: Sequence[Task],
    **options: Any,
) -> dict[str, LoopMetric]:
    """Collect the loop metrics that tasks ask for, from Hessians that are there; options as `collect_metrics`."""

    def hessian(task: Task) -> NDArray[np.float64]:
        accumulator = sums.accumulator(str(task.leader), task.steps)
        return np.asarray(accumulator.matrix(list(task.steps)), dtype=np.float64)

    return collect_metrics(system, tokens, tasks, hessian, **options)


@dataclass
class _Gradients:
    """Gradients of all draws, to be gone through twice: kept in between where they fit."""

    system: LoopedSystem
    tokens: TokenSet
    tasks: Sequence[Task]
    depth: int
    seed: int
    n_draws: int
    progress: Progress

    def __post_init__(self) -> None:
        self.total = len(self.tokens.sequences) * self.n_draws
        weights = sum(t.parameter.in_features * t.parameter.out_features for t in self.tasks)
        self._keep = 4 * weights * self.total <= KEPT_BYTES
        self._kept: list[dict[str, Tensor]] = []
        self.progress.start("metric", self.total * (1 if self._keep else 2), "gradients")

    def each(self) -> Iterator[tuple[str, NDArray[np.float64]]]:
        """Yield (parameter name, gradient with outputs first)."""
        flip = {t.parameter.name: t.parameter.orientation == "in_out" for t in self.tasks}
        for found in list(self._kept) or self._fresh(list(flip)):
            for name, grad in found.items():
                values: NDArray[np.float64] = grad.detach().double().cpu().numpy()
                yield name, np.ascontiguousarray(values.T) if flip[name] else values

    def _fresh(self, names: list[str]) -> Iterator[dict[str, Tensor]]:
        for found in draws(self.system, self.tokens, names, self.depth, self.seed, self.n_draws):
            if self._keep:
                self._kept.append(found)
            yield found
            self.progress.advance()


def _blocks(rows: int) -> list[slice]:
    return [slice(i, min(rows, i + BLOCK)) for i in range(0, rows, BLOCK)]
