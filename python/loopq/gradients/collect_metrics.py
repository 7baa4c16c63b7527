"""Collect loop metrics: gradients of drawn labels through the unrolled loop, summed on either side of a weight."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.data import TokenSet
from loopq.calibrate.hessians import Hessians
from loopq.errors import ConfigError, SystemContractError
from loopq.gradients.scores import draw_labels
from loopq.gradients.unroll import unroll
from loopq.quantizers.loop_metric import BLOCK, DAMPING, RIDGE, LoopMetric, n_gradient_prompts, ridged
from loopq.quantizers.task import Task
from loopq.settings.execution import Execution
from loopq.storage.files import RawTensor
from loopq.storage.journal import Journal, Snapshots
from loopq.systems.base import LoopedSystem, model_code

if TYPE_CHECKING:
    from torch import Tensor

    from loopq.gradients.sketch import Side

#: Columns of the thin matrices of all prompts together, for each output of a block; and most columns of one.
COLUMNS, MOST = 8, 256
#: Gradients are computed for the sums between outputs, and again for those between inputs, which need the former.
ROUNDS = 2


def rank_of(n_prompts: int) -> int:
    """Columns of a gradient's thin matrix: fewer of each where there are more of them."""
    return min(MOST, -(-COLUMNS * BLOCK // n_prompts))


@dataclass(frozen=True)
class MetricCost:
    """What the collection of loop metrics takes.

    Parameters
    ----------
    n_gradients : int
        Backward passes of both rounds.
    n_draws : int
        Of these, of one prompt and round.
    multiply_adds : float
        Single-precision products of all gradients with thin matrices.
    memory : int
        Bytes of the sums and of the matrices beside them.
    """

    n_gradients: int
    n_draws: int
    multiply_adds: float
    memory: int


def metric_cost(tasks: Sequence[Task], tokens: TokenSet) -> MetricCost:
    """Say what `collect_metrics` will take of some prompts; all zero where no layer asks for a loop metric."""
    (most, n_draws), chosen = _chosen(tasks)
    if not chosen:
        return MetricCost(0, 1, 0.0, 0)
    n_prompts = n_gradient_prompts(most, len(tokens.sequences))
    n_tokens = tokens.take(0, n_prompts).n_tokens
    rank, total = rank_of(n_prompts), n_prompts * n_draws
    products, memory = 0.0, 0
    for p in (t.parameter for t in chosen):
        wide, high, block = p.in_features, p.out_features, min(BLOCK, p.out_features)
        rows = n_tokens * p.invocations
        products += rank * (rows * (wide + n_draws * (2 * high + wide)) + total * (high * block + wide**2))
        # Both sums in double precision; one of them, and the root of the other side, in single precision.
        memory += 12 * (wide**2 + high * block) + 4 * rank * (high + wide)
    # While a root is made: the damped matrix, its factor, and what is solved for.
    memory += 24 * max(t.parameter.in_features for t in chosen) ** 2
    return MetricCost(ROUNDS * total, n_draws, products, memory)


def _chosen(tasks: Sequence[Task]) -> tuple[tuple[int | None, int], list[Task]]:
    """Layers that ask for a loop metric; most prompts and draws for each, which must be the same for all."""
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
        Seed of initial states, draws and thin matrices; progress.
    journal : Journal
        Where the sums are saved now and then, so that a killed run can be resumed.

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
    Sums and products are single precision, on the model's device (`loopq.gradients.sketch`). A needs H alone, S needs
    A: the prompts are run twice. The same number of threads gives the same bits, another may change last bits.
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
    """Names of the layers that a gradient of the first prompt reaches.

    Raises
    ------
    LoopqError
        There are no gradients, or they are not finite.
    """
    from loopq.gradients.sketch import Reached  # lazy: loopq imports without torch

    side = Reached({})
    backward = _Backward(system, tokens.take(0, 1), n_steps, 1, seed)
    for _ in backward.run(side, tasks, 0):
        pass
    return set(side.sums)


@dataclass
class _Backward:
    """Backward passes of drawn labels, prompt by prompt.

    Notes
    -----
    Logits: the log-likelihood of labels drawn from the model's own distribution, at the positions that are scored.
    Hidden states: the product with normal noise, the same thing for a square error.
    """

    system: LoopedSystem
    tokens: TokenSet
    n_steps: int
    n_draws: int
    seed: int
    _labels: dict[tuple[int, int], NDArray[np.int64]] = field(default_factory=dict)

    def run(self, side: Side, tasks: Sequence[Task], skip: int) -> Generator[int, None, None]:
        """Hand gradients to a side; yield after each with the number of prompts that are done by then."""
        from loopq.gradients.sketch import Taps  # lazy: loopq imports without torch

        with Taps(self.system, tasks, side) as taps:
            for done, batch in enumerate(
                itertools.islice(self.tokens.batches(1, self.seed), skip, None), skip
            ):
                prompt = batch.prompts[0]
                side.begin(prompt, 0)
                with model_code(f"gradient of prompt {prompt}"):
                    out = self.tokens.scored(
                        unroll(self.system, batch, self.n_steps).float(), self.system.output
                    )
                    for draw in range(self.n_draws):
                        if draw:
                            side.begin(prompt, draw)
                        last = draw + 1 == self.n_draws
                        taps.backward(self._target(out, prompt, draw), last=last)
                        yield done + last

    def _target(self, out: Tensor, prompt: int, draw: int) -> Tensor:
        import torch  # lazy: loopq imports without torch

        if self.system.output == "logits":
            logp = out.log_softmax(-1)
            # Drawing takes as long as a step of the loop where the vocabulary is large: once for both rounds.
            if (prompt, draw) not in self._labels:
                self._labels[prompt, draw] = draw_labels(
                    logp.detach().cpu().numpy(), [self.seed, prompt, draw]
                )
            labels = self.system.to_device(torch.from_numpy(self._labels[prompt, draw]))
            return logp.gather(-1, labels[..., None]).sum()
        noise = np.random.default_rng([self.seed, prompt, draw]).standard_normal(tuple(out.shape))
        return (out * self.system.to_device(torch.from_numpy(noise.astype(np.float32)))).sum()


@dataclass
class _Collector:
    """Both rounds over the prompts."""

    system: LoopedSystem
    tokens: TokenSet
    n_steps: int
    n_draws: int
    execution: Execution
    sums: _Sums

    def __post_init__(self) -> None:
        n_prompts = len(self.tokens.sequences)
        self.total = n_prompts * self.n_draws
        self.rank = rank_of(n_prompts)
        self.backward = _Backward(self.system, self.tokens, self.n_steps, self.n_draws, self.execution.seed)

    def run(self, tasks: Sequence[Task], hessians: Hessians) -> dict[str, LoopMetric]:
        """Return the metrics of the layers that a gradient reaches."""
        from loopq.gradients.sketch import Left, Right  # lazy: loopq imports without torch

        sums, progress = self.sums, self.execution.progress
        sums.resume(self.system)
        progress.start("metric", ROUNDS * self.total, "gradients")
        done = sums.round * self.total + sums.done * self.n_draws
        if done:
            progress.note(f"resumed after {done} gradients")
            progress.advance(done)
        if sums.round == 0:
            self._round(Left(sums.left, self._input_roots(tasks, hessians), self.rank, BLOCK), tasks)
        left = self._left(tasks)
        if sums.round == 1:
            side = Right(sums.right, self._output_roots(left), self.rank, self.execution.seed, self.n_draws)
            self._round(side, [t for t in tasks if t.name in left])
        progress.stop()
        return {
            name: LoopMetric(
                tuple(ridged(a, RIDGE) for a in blocks), _double(sums.right.pop(name)), self.total
            )
            for name, blocks in left.items()
        }

    def _round(self, side: Side, tasks: Sequence[Task]) -> None:
        sums = self.sums
        with contextlib.closing(self.backward.run(side, tasks, sums.done)) as gradients:
            for done in gradients:
                if done > sums.done:
                    sums.done = done
                    if sums.due():
                        sums.save()
                self.execution.progress.advance()
        sums.round, sums.done = sums.round + 1, 0
        if sums.round == ROUNDS:
            sums.save()

    def _input_roots(self, tasks: Sequence[Task], hessians: Hessians) -> dict[str, Tensor]:
        """Roots of the damped Hessians' inverses; layers that sum one input over the same steps have one."""
        found: dict[Any, Tensor] = {}
        for task in tasks:
            key = (task.input_group, task.steps)
            if key not in found:
                columns = min(task.parameter.in_features, len(self.tokens.sequences) * self.rank)
                found[key] = self._root(_summed(hessians, task), DAMPING, str(task.input_group), 0, columns)
        return {t.name: found[t.input_group, t.steps] for t in tasks}

    def _output_roots(self, left: Mapping[str, Sequence[Any]]) -> dict[str, list[Tensor]]:
        return {
            name: [self._root(a, RIDGE, f"{name}/{i}", 1, len(a)) for i, a in enumerate(blocks)]
            for name, blocks in left.items()
        }

    def _root(self, matrix: Any, share: float, name: str, side: int, n_columns: int) -> Tensor:
        import torch  # lazy: loopq imports without torch

        from loopq.gradients.sketch import root, seed_of

        seed = seed_of(name, self.execution.seed, side)
        return self.system.to_device(torch.from_numpy(root(matrix, share, seed, n_columns)))

    def _left(self, tasks: Sequence[Task]) -> dict[str, list[NDArray[np.float64]]]:
        """Sums between outputs of the layers that a gradient reaches, which all but experts must be."""
        found = {n: [_double(a) for a in blocks] for n, blocks in self.sums.left.items()}
        for t in tasks:
            # An expert that was given no row has no gradient, or one of zeros.
            if t.parameter.routed_in and not any(a.any() for a in found.get(t.name, ())):
                found.pop(t.name, None)
            elif t.name not in found:
                raise SystemContractError(f"no gradient reaches {t.name}: use metric 'inputs' there")
        return found


def _double(sums: Tensor) -> NDArray[np.float64]:
    found: NDArray[np.float64] = sums.double().cpu().numpy()
    return found


def _n_rows(hessians: Hessians, task: Task) -> int:
    found = hessians.accumulator(str(task.input_group), task.steps)
    return sum(found.n_rows(step) for step in task.steps)


def _summed(hessians: Hessians, task: Task) -> NDArray[np.float64]:
    found = hessians.accumulator(str(task.input_group), task.steps)
    return np.asarray(found.matrix(list(task.steps)), dtype=np.float64)


@dataclass
class _Sums:
    """Sums of gradients on either side of each weight, saved so that a killed run can be resumed.

    Sums are stored as they are and prompts are added in one order: a resumed run has the same bits.
    """

    journal: Journal
    left: dict[str, list[Tensor]] = field(default_factory=dict)
    right: dict[str, Tensor] = field(default_factory=dict)
    round: int = 0
    done: int = 0
    snapshots: Snapshots = field(default_factory=Snapshots)

    def due(self) -> bool:
        """Whether it is time to save again."""
        return self.snapshots.due()

    def save(self) -> None:
        """Save the sums, whole, with the prompts of the round that they hold."""
        if self.journal.folder is None:
            return
        tensors = {f"left/{n}/{i:05d}": a for n, blocks in self.left.items() for i, a in enumerate(blocks)}
        tensors |= {f"right/{n}": a for n, a in self.right.items()}
        arrays = {n: RawTensor.of(a.cpu().numpy()) for n, a in tensors.items()}
        with self.snapshots.saving():
            self.journal.save("sums", arrays, round=self.round, done=self.done)

    def resume(self, system: LoopedSystem) -> None:
        """Take over saved sums of the same work, if there are any."""
        import torch  # lazy: loopq imports without torch

        found = self.journal.find("sums")
        if found is None:
            return
        self.round, self.done = int(found.facts["round"]), int(found.facts["done"])
        for name, tensor in sorted(found.tensors.items()):
            side, _, rest = name.partition("/")
            values = system.to_device(torch.from_numpy(np.array(tensor.array(), dtype=np.float32)))
            if side == "right":
                self.right[rest] = values
            else:
                self.left.setdefault(rest.rpartition("/")[0], []).append(values)
