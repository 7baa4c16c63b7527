"""Forecast of a quantization's cost from the model's shape alone. It reads no weight and runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loopq.calibrate.data import TokenSet
from loopq.calibrate.select import shared
from loopq.errors import ConfigError
from loopq.gradients.collect_metrics import metric_cost
from loopq.layers.shared import SharedParameter
from loopq.models.stream import layers_of
from loopq.quantizers.task import Task
from loopq.run.config import QuantConfig
from loopq.run.estimate import core_rate, duration, product_rate
from loopq.run.memory import solve_bytes
from loopq.run.plan import Plan, hessian_work, solve_work
from loopq.settings.execution import PLANNED, Execution, available_bytes
from loopq.systems.base import LoopedSystem
from loopq.systems.declare import parameter_of
from loopq.terminal.table import size

if TYPE_CHECKING:
    from torch import nn

#: Assumed bytes per second of the disk, for weights that do not fit in memory.
_DISK = 1e9


@dataclass(frozen=True)
class Forecast:
    """Forecast of a quantization's cost.

    Parameters
    ----------
    weights : int
        Bytes of the model.
    held : int
        Bytes of weights in memory at once. These are all weights, or twice the largest layer plus weights of no layer.
    sums : int
        Bytes of the Hessians of all distinct inputs, and of the loop metrics of all layers.
    most : int
        Bytes of these and of the solves in one pass.
    codes : int
        Bytes of disk for codes before writing, one byte per code.
    output : int
        Bytes of the checkpoint. It includes unquantized tensors.
    limit : int
        Bytes that may be used.
    n_passes : int
        Runs over the calibration set. Memory determines it.
    n_tokens : int
        Tokens of the calibration set.
    seconds : mapping of str to float
        Seconds of rollouts, gradients, Hessians, solves and reading. The rates are measured now.
    """

    weights: int
    held: int
    sums: int
    most: int
    codes: int
    output: int
    limit: int
    n_passes: int
    n_tokens: int
    seconds: Mapping[str, float]

    @property
    def streamed(self) -> bool:
        """Whether weights are read again for each visit of a layer, because they do not fit."""
        return self.held < self.weights

    @property
    def peak(self) -> int:
        """Maximum bytes in memory."""
        return self.held + self.most

    def lines(self) -> list[str]:
        """Return the forecast as lines to print."""
        how = "read layer by layer, since they do not fit" if self.streamed else "all in memory"
        parts = ", ".join(f"{what} {duration(s)}" for what, s in self.seconds.items() if s >= 1)
        fits = "" if self.peak <= self.limit else "; this is above the limit: take a machine with more memory"
        return [
            f"weights: {size(self.weights)} ({self.weights:,} bytes), {how}: {size(self.held)} at once",
            f"Hessians and loop metrics: {size(self.sums)} of all layers, {size(self.most)} at once with the largest "
            f"solve, in {self.n_passes} passes over {self.n_tokens:,} tokens",
            f"disk: checkpoint {size(self.output)}, and until it is written {size(self.codes)} for codes and "
            f"{size(self.output)} for solved layers",
            f"afterwards: evaluate holds {size(self.held)} at once, run {size(self.output)}, export to another format "
            f"{size(2 * self.codes + self.output)}",
            f"memory: {size(self.peak)} ({self.peak:,} bytes) of {size(self.limit)}{fits}",
            f"time: {duration(sum(self.seconds.values()))} ({sum(self.seconds.values()):.0f} seconds: {parts})",
        ]


def forecast(
    system: LoopedSystem,
    config: QuantConfig,
    tokens: TokenSet,
    execution: Execution,
    n_steps: int | None = None,
) -> Forecast:
    """Forecast the cost of a quantization.

    Parameters
    ----------
    system : LoopedSystem
        Adapter of a model, which may be without values (device "meta").
    config : QuantConfig
        Settings. An open metric counts as "loop".
    tokens : TokenSet
        Calibration set. Only the number of tokens matters.
    execution : Execution
        Threads, batch size, and the memory limit, which covers everything here; nine tenths of the free memory if open.
    n_steps : int, optional
        Depth. The model's own depth is the default.

    Notes
    -----
    Layers of one module with one width are assumed to read one input. Experts share the tokens evenly.
    """
    parameters = system.shared_parameters(system.check_depth(n_steps or system.n_steps))
    observed = [p for p in parameters if p.treatment != "dense"]
    single_shares = _shares(system, observed)
    n_tokens = tokens.n_tokens
    input_groups, shares = shared(observed, _inputs(observed), single_shares, n_tokens)
    tasks = Plan.of(parameters, input_groups, config.with_metric("loop")).tasks
    widths = {t.input_group: t.parameter.in_features for t in tasks if t.input_group}
    sums = {group: 8 * width * (width + 1) for group, width in widths.items()}
    largest = max(sums.values(), default=0)
    solve = max((solve_bytes(task) for task in tasks), default=0) + 2 * largest
    weights, layer = _weights(system)
    free = available_bytes()
    limit = execution.memory or (weights if free is None else int(PLANNED * free))
    held, at_once = weights, 1
    if weights + solve + largest + _largest_metric(tasks, tokens, 1) > limit:
        held, at_once = layer, execution.batch_size if layer < weights else 1
    metric = metric_cost(tasks, tokens, at_once, shares)
    largest += _largest_metric(tasks, tokens, at_once)
    room = _room(limit, held, largest, solve)
    total = max(sum(sums.values()), sum(sums.values()) // 2 + metric.memory)
    n_passes = max(1, -(-total // room))
    codes, output = _stored(tasks, weights)
    products = sum(_numbers(p) * p.invocations * single_shares.get(p.name, 1.0) for p in parameters)
    seconds = _seconds(products, tasks, n_tokens, n_passes, shares, execution.threads)
    # Forward and backward. If weights are read again for the backward pass, there is one more forward pass.
    gradient = seconds["rollouts"] / len(tokens.sequences) * metric.n_gradients
    seconds["gradients"] = (2 + (held < weights)) * gradient + metric.multiply_adds / product_rate()
    if held < weights:
        read = weights + _read_again(system, parameters)
        visits = -(-len(tokens.sequences) // execution.batch_size)
        visits += 2 * -(-metric.n_gradients // execution.batch_size)
        seconds["reading weights"] = n_passes * visits * read / _DISK
    most = min(total, room) + solve
    return Forecast(weights, held, total, most, codes, output, limit, n_passes, n_tokens, seconds)


def _room(limit: int, held: int, largest: int, solve: int) -> int:
    """Bytes that the sums of a pass may take."""
    room = limit - held - solve
    if room < largest:
        raise ConfigError(
            f"one layer takes {size(held)}, its Hessian and loop metric {size(largest)}, a solve {size(solve)}: "
            f"together above the limit of {size(limit)}; raise --memory"
        )
    return room


def _largest_metric(tasks: Sequence[Task], tokens: TokenSet, at_once: int) -> int:
    return max((metric_cost([t], tokens, at_once).memory for t in tasks), default=0)


def _read_again(system: LoopedSystem, parameters: Sequence[SharedParameter]) -> int:
    """Bytes of a visit after the first one of each layer."""
    each = ((p, parameter_of(system.model, p).element_size()) for p in parameters)
    return sum((p.invocations - 1) * _numbers(p) * size for p, size in each)


def _numbers(p: SharedParameter) -> int:
    return p.in_features * p.out_features


def _stored(tasks: Sequence[Task], weights: int) -> tuple[int, int]:
    """Bytes of codes, and of the checkpoint with 16 bits for other tensors."""
    p = [(t.parameter, t.config.grid.make()) for t in tasks]
    scales = sum(grid.n_groups(q.in_features) * q.out_features for q, grid in p)
    packed = sum(grid.bits * _numbers(q) for q, grid in p) // 8
    codes = sum(_numbers(q) for q, _ in p)
    return codes, max(0, weights - 2 * codes) + packed + 2 * scales


def _seconds(
    products: float,
    tasks: Sequence[Task],
    n_tokens: int,
    n_passes: int,
    shares: Mapping[str, float],
    threads: int,
) -> dict[str, float]:
    core = core_rate(max((t.parameter.in_features for t in tasks), default=512), threads)
    return {
        "rollouts": n_passes * n_tokens * products / product_rate(),
        "Hessians": hessian_work(tasks, n_tokens, shares) / core,
        "solves": solve_work(tasks) / core,
    }


def _inputs(parameters: Sequence[SharedParameter]) -> dict[str, str]:
    """Map each parameter name to the first one of its module with the same width."""
    first: dict[tuple[str, int], str] = {}
    return {
        p.name: first.setdefault((p.owners[0].rpartition(".")[0], p.in_features), p.name) for p in parameters
    }


def _shares(system: LoopedSystem, parameters: Sequence[SharedParameter]) -> dict[str, float]:
    """Share of the tokens of an expert."""
    settings: Any = getattr(system.model, "config", None)
    settings = settings.get_text_config() if hasattr(settings, "get_text_config") else settings
    chosen = getattr(settings, "num_experts_per_tok", 1)
    routed = [p for p in parameters if p.routed_in]
    blocks: dict[str, set[str]] = {}
    for p in routed:
        blocks.setdefault(p.routed_in, set()).add(p.owners[0].rpartition(".")[0])
    return {p.name: min(1.0, chosen / len(blocks[p.routed_in])) for p in routed}


def _weights(system: LoopedSystem) -> tuple[int, int]:
    """Bytes of all weights, and of those needed at once: the largest layer twice, and weights of no layer."""

    def total(module: nn.Module) -> int:
        return sum(int(p.numel() * p.element_size()) for p in module.parameters())

    everything = total(system.model)
    layers = [total(layer) for layer in layers_of(system.model).values()]
    return everything, min(everything, everything - sum(layers) + 2 * max(layers, default=0))
