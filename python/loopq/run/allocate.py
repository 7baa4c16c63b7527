"""Bits and group size of each layer under a byte budget."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from loopq.errors import ConfigError
from loopq.execution import parse_bytes
from loopq.gradients.scores import loop_fisher, measured
from loopq.grid import BITS, PER_CHANNEL
from loopq.quantizers.config import Override
from loopq.settings import Settings, parse_text, setting
from loopq.steps import Calibration

if TYPE_CHECKING:
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
    """One way to quantize one layer.

    Parameters
    ----------
    layer : str
        Parameter name.
    bits : int
        Bits of a code.
    n_bytes : int
        Bytes that the layer then takes.
    cost : float
        What the model then loses, in the same unit for every layer.
    group_size : int
        Input columns of a scale.
    """

    layer: str
    bits: int
    n_bytes: int
    cost: float
    group_size: int


def choose_bits(candidates: Sequence[Candidate], budget: int) -> list[Candidate]:
    """Choose one candidate for each layer so that the sum of costs is least and the bytes stay within the budget.

    Parameters
    ----------
    candidates : sequence of Candidate
        All candidates of all layers.
    budget : int
        Bytes.

    Returns
    -------
    list of Candidate
        The exact optimum, one for each layer.

    Raises
    ------
    ConfigError
        Not even the smallest candidates fit.

    Notes
    -----
    Layer by layer the set of (bytes, cost) pairs that no other pair beats in both is kept; the best pair within the
    budget at the end is the optimum. Bytes of real layers have large common divisors, so that the sets stay small.
    """
    layers: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        layers.setdefault(candidate.layer, []).append(candidate)
    if not layers:
        raise ConfigError("nothing to allocate: no candidates")
    least = sum(min(c.n_bytes for c in of_layer) for of_layer in layers.values())
    if least > budget:
        raise ConfigError(
            f"the budget is {budget} bytes; the smallest candidate of every layer takes {least}"
        )
    rest = least
    front: list[tuple[int, float, tuple[Candidate, ...]]] = [(0, 0.0, ())]
    for of_layer in layers.values():
        rest -= min(c.n_bytes for c in of_layer)
        grown = [
            (size + c.n_bytes, cost + c.cost, (*path, c))
            for size, cost, path in front
            for c in of_layer
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
    """Choose bits and group size of every layer of a run.

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
    """
    sums = run.all_steps("allocate")
    config = dataclasses.replace(run.config, allocate=None)
    plain = config.layer.changed(step_weights=Calibration().step_weights)
    if plain.method.gradients:
        plain = plain.changed(metric="inputs")
    sizes: dict[tuple[str, str], tuple[int, int, int]] = {}
    weights: dict[tuple[str, str], NDArray[np.float32]] = {}
    for bits in asked.bits:
        for group in asked.group_sizes:
            settings = dataclasses.replace(config, layer=plain.changed(bits=bits, group_size=group))
            # Scores compare layers, one at a time: each on the inputs of full precision.
            for name, layer in run.solve_from(sums, settings.changed(inputs="open")).items():
                # An override may have fixed either; then several candidates are one and the same.
                key = (name, f"INT{layer.bits} g{layer.group_size}")
                sizes[key] = (layer.bits, layer.group_size, layer.n_bytes)
                weights[key] = layer.in_model_orientation()
    costs = _costs(run, weights, asked)
    n_weights = sum(t.parameter.in_features * t.parameter.out_features for t in run.tasks)
    candidates = [Candidate(key[0], b, n, costs[key], g) for key, (b, g, n) in sizes.items()]
    found = choose_bits(candidates, asked.n_bytes(n_weights))
    own = tuple(
        Override(f"re:^{re.escape(c.layer)}$", {"bits": c.bits, "group_size": c.group_size}) for c in found
    )
    n_bytes = sum(c.n_bytes for c in found)
    return dataclasses.replace(config, overrides=(*config.overrides, *own)), {
        "asked": asked.to_json(),
        "budget_bytes": asked.n_bytes(n_weights),
        "n_bytes": n_bytes,
        "bits_a_weight": 8 * n_bytes / n_weights,
        "predicted_cost": sum(c.cost for c in found),
        "layers": {c.layer: {"bits": c.bits, "group_size": c.group_size} for c in found},
    }


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
