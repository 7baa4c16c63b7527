"""Bits and group size of each layer under a byte budget."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from loopq.errors import ConfigError
from loopq.gradients.scores import loop_fisher, measured
from loopq.layers.grid import BITS, PER_CHANNEL
from loopq.quantizers.config import Override
from loopq.settings.declare import Settings, parse_text, setting
from loopq.settings.execution import parse_bytes
from loopq.settings.steps import Calibration

if TYPE_CHECKING:
    from loopq.quantizers.task import Task
    from loopq.run.config import QuantConfig
    from loopq.run.engine import Run


def parse_budget(text: str) -> float | int:
    """Read bits a weight, as in 3.25, or bytes with a unit, as in 900K."""
    found: float | int = parse_bytes(text) if text[-1:].upper() in tuple("KMGTB") else parse_text(float, text)
    return found


@dataclass(frozen=True)
class Allocate(Settings):
    """How bits are divided between layers.

    Parameters
    ----------
    budget : float or int
        Budget that bits and group size of each layer are chosen under: bits a weight, with scales and zero points, as
        in 3.25; or bytes of all quantized layers, as in 900K.
    score : {"ablation", "fisher"}
        Cost of a candidate: the KL measured with that layer alone quantized, or the KL that gradients through the
        loop predict.
    bits : tuple of int
        Bits that a layer may be given.
    group_sizes : tuple of int
        Group sizes that a layer may be given.
    n_prompts : int
        Calibration prompts that the cost is taken on.
    """

    budget: float | int = setting(4.0, parse=parse_budget, metavar="BUDGET")
    score: Literal["ablation", "fisher"] = setting("ablation")
    bits: tuple[int, ...] = setting(BITS)
    group_sizes: tuple[int, ...] = setting((32, 64, 128))
    n_prompts: int = setting(16, at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.bits or not self.group_sizes:
            raise ConfigError("bits and group sizes of an allocation: give one or more of each")
        wrong = sorted(set(self.bits) - set(BITS))
        if wrong:
            raise ConfigError(f"bits must be of {', '.join(map(str, BITS))}; got {wrong[0]}")
        for size in self.group_sizes:
            if size != PER_CHANNEL and size < 1:
                raise ConfigError(f"group_sizes must be -1 (per channel) or at least 1; got {size}")
        if not self.budget > 0:
            raise ConfigError(f"budget must be above 0; got {self.budget!r}")

    def n_bytes(self, n_weights: int) -> int:
        """The budget in bytes for that many weights."""
        return int(self.budget * n_weights / 8) if isinstance(self.budget, float) else self.budget


@dataclass(frozen=True)
class Candidate:
    """One way to quantize layers that are quantized alike.

    Parameters
    ----------
    layers : tuple of str
        Parameter names.
    bits : int
        Bits of a code.
    n_bytes : int
        Bytes that the layers then take.
    cost : float
        What the model then loses, in the same unit for all candidates.
    group_size : int
        Input columns of a scale.
    """

    layers: tuple[str, ...]
    bits: int
    n_bytes: int
    cost: float
    group_size: int


def choose_bits(candidates: Sequence[Candidate], budget: int) -> list[Candidate]:
    """Choose one candidate for all layers so that the sum of costs is least and the bytes stay within the budget.

    Parameters
    ----------
    candidates : sequence of Candidate
        All candidates; no layer belongs to two different sets of layers.
    budget : int
        Bytes.

    Returns
    -------
    list of Candidate
        The exact optimum, one for each set of layers.

    Raises
    ------
    ConfigError
        Not even the smallest candidates fit.

    Notes
    -----
    Step by step the set of (bytes, cost) pairs that no other pair beats in both is kept; the best pair within the
    budget at the end is the optimum. Bytes of real layers have large common divisors, so that the sets stay small.
    """
    sets: dict[tuple[str, ...], list[Candidate]] = {}
    for candidate in candidates:
        sets.setdefault(candidate.layers, []).append(candidate)
    if not sets:
        raise ConfigError("nothing to allocate: no candidates")
    least = sum(min(c.n_bytes for c in of_set) for of_set in sets.values())
    if least > budget:
        raise ConfigError(
            f"the budget is {budget} bytes; the smallest candidate of every layer takes {least}"
        )
    rest = least
    front: list[tuple[int, float, tuple[Candidate, ...]]] = [(0, 0.0, ())]
    for of_set in sets.values():
        rest -= min(c.n_bytes for c in of_set)
        grown = [
            (size + c.n_bytes, cost + c.cost, (*path, c))
            for size, cost, path in front
            for c in of_set
            if size + c.n_bytes + rest <= budget
        ]
        grown.sort(key=lambda item: (item[0], item[1]))
        front, best = [], float("inf")
        for item in grown:
            if item[1] < best:
                best = item[1]
                front.append(item)
    return list(min(front, key=lambda item: (item[1], item[0]))[2])


def allocate(run: Run, asked: Allocate) -> tuple[QuantConfig, dict[str, Any]]:
    """Choose bits and group size of every layer of a run, the same for layers that read the same input.

    Parameters
    ----------
    run : Run
        Its layers are quantized open loop, by its settings, as every candidate asks.
    asked : Allocate
        Budget, score and candidates.

    Returns
    -------
    QuantConfig
        The run's settings with an override for every layer.
    dict
        What was asked, what it came to and what it cost, for the report.

    Notes
    -----
    Inference engines put q, k and v, or gate and up, into one matrix of one scheme; these are the layers of one input.
    """
    sums = run.all_steps("allocate")
    config = dataclasses.replace(run.config, allocate=None)
    plain = config.layer.changed(step_weights=Calibration().step_weights)
    if plain.method.gradients:
        plain = plain.changed(metric="inputs")
    # By layer, bits and group size; an override may have fixed either: then several candidates are one and the same.
    sizes: dict[tuple[str, int, int], tuple[int, int, int]] = {}
    weights: dict[tuple[str, str], NDArray[np.float32]] = {}
    for bits in asked.bits:
        for group in asked.group_sizes:
            settings = dataclasses.replace(config, layer=plain.changed(bits=bits, group_size=group))
            # Scores compare layers, one at a time: each on the inputs of full precision.
            for name, layer in run.solve_from(sums, settings.changed(inputs="open")).items():
                grid = layer.grid
                sizes[name, bits, group] = grid.bits, grid.group_size, layer.n_bytes
                weights[_key(name, grid.bits, grid.group_size)] = layer.in_model_orientation()
    costs = _costs(run, weights, asked)
    candidates = []
    for names in _alike(run.tasks):
        for bits, group in itertools.product(asked.bits, asked.group_sizes):
            found = [(name, *sizes[name, bits, group]) for name in names]
            n_bytes, cost = sum(n for *_, n in found), sum(costs[_key(n, b, g)] for n, b, g, _ in found)
            candidates.append(Candidate(names, bits, n_bytes, cost, group))
    n_weights = sum(t.parameter.in_features * t.parameter.out_features for t in run.tasks)
    chosen = choose_bits(candidates, asked.n_bytes(n_weights))
    grids = {}
    for c in chosen:
        for name in c.layers:
            own_bits, own_group, _ = sizes[name, c.bits, c.group_size]
            grids[name] = {"bits": own_bits, "group_size": own_group}
    own = tuple(Override(f"re:^{re.escape(name)}$", grid) for name, grid in grids.items())
    n_bytes = sum(c.n_bytes for c in chosen)
    return dataclasses.replace(config, overrides=(*config.overrides, *own)), {
        "asked": asked.to_json(),
        "budget_bytes": asked.n_bytes(n_weights),
        "n_bytes": n_bytes,
        "bits_a_weight": 8 * n_bytes / n_weights,
        "predicted_cost": sum(c.cost for c in chosen),
        "layers": grids,
    }


def _key(name: str, bits: int, group_size: int) -> tuple[str, str]:
    return name, f"INT{bits} g{group_size}"


def _alike(tasks: Sequence[Task]) -> list[tuple[str, ...]]:
    """Names of the layers that read one input, in the order of the tasks; layers without activations stand alone."""
    sets: dict[str, list[str]] = {}
    for task in tasks:
        sets.setdefault(task.input_group or task.name, []).append(task.name)
    return [tuple(names) for names in sets.values()]


def _costs(
    run: Run, weights: Mapping[tuple[str, str], NDArray[np.float32]], asked: Allocate
) -> dict[tuple[str, str], float]:
    job, journal, progress = run.job, run.journal("scores"), run.execution.progress
    tokens = job.tokens.take(0, asked.n_prompts)
    n_steps = job.selection.n_steps
    if asked.score == "fisher":
        return loop_fisher(
            job.system, weights, tokens, n_steps=n_steps, execution=run.execution, journal=journal
        )
    costs: dict[tuple[str, str], float] = {}
    progress.start("ablation", len(run.tasks), "layers")
    for task in run.tasks:
        # All candidates of a layer share one full-precision rollout, and a kill loses no more than them.
        own = {key: weight for key, weight in weights.items() if key[0] == task.name}
        piece = journal.find(task.name)
        found = dict(piece.facts["costs"]) if piece else None
        if found is None:
            costs_of_own = measured(job.system, own, tokens, n_steps=n_steps, seed=run.execution.seed)
            found = {key[1]: cost for key, cost in costs_of_own.items()}
            journal.save(task.name, costs=found)
        costs |= {(task.name, label): cost for label, cost in found.items()}
        progress.advance()
    progress.stop()
    return costs
