"""From problems to codes: batches of problems that run together, and their reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopq.errors import NonFiniteError, OutOfMemoryError
from loopq.layers.grid import ScaleSearch
from loopq.quantizers.base import Problem
from loopq.quantizers.damping import Damping
from loopq.quantizers.twin.coupled import Left, coupled
from loopq.quantizers.twin.factor import Factors, Order
from loopq.quantizers.twin.grid import Codes, refuse_scales
from loopq.quantizers.twin.settle import Stages, fitted, joined, settle
from loopq.quantizers.twin.sweep import sweep
from loopq.settings.execution import device_bytes, require_float32

Found = dict[str, Any]
#: Bytes of a batch on a device that does not report its memory.
BYTES = 1 << 30
#: Bytes per weight of the rows whose codes change, including temporaries.
ROW_BYTES = 160


@dataclass(frozen=True)
class LayerBatch:
    """Layers that run together: the same number of rows for each input, on one grid."""

    inputs: list[list[Problem]]

    @property
    def problems(self) -> list[Problem]:
        """All layers of the batch."""
        return [p for layers in self.inputs for p in layers]

    @property
    def names(self) -> list[str]:
        """A layer of each input."""
        return [layers[0].name for layers in self.inputs]

    @property
    def device(self) -> torch.device:
        """Device of the batch."""
        return torch.device(self.inputs[0][0].device)

    def target(self) -> Tensor:
        """The rows of all layers, (L, rows, d).

        Raises
        ------
        NonFiniteError
            A weight is NaN or infinite.
        """
        rows = [torch.from_numpy(np.concatenate([p.target for p in layers])) for layers in self.inputs]
        stacked = torch.stack(rows).to(self.device)
        if not bool(stacked.isfinite().all()):
            bad = next(p.name for p in self.problems if not np.isfinite(p.target).all())
            raise NonFiniteError(f"layer {bad}: W has an entry that is NaN or infinite")
        return stacked

    def codes(self, search: ScaleSearch, signed: bool) -> Codes:
        """Return the layers' grid as codes."""
        p = self.inputs[0][0]
        return Codes.of(p.grid, p.target.shape[1], search, signed, p.settings.scale_bits, self.device)

    def factors(
        self, hessians: Sequence[NDArray[np.float64]], damping: Damping, order: Order, precision: str
    ) -> Factors:
        """Factor S of each input."""
        stack = torch.stack([torch.from_numpy(h).to(self.device) for h in hessians])
        mu = np.stack([damping.vector(h) for h in hessians])
        kind = {"float64": torch.float64, "float32": torch.float32}[precision]
        return Factors.of(stack, torch.from_numpy(mu).to(self.device), order, self.names, kind)

    def found(self, codes: Codes, taken: Tensor, scale: Tensor, zero: Tensor) -> list[Found]:
        """Return the arrays of each layer in the core's form."""
        kept = (taken - codes.middle).view(torch.int8) if codes.grid.symmetric else taken
        parts = [self._by_layer(x) for x in (kept, scale, zero.to(torch.uint8))]
        return [
            {"codes": c, "scales": s, "zeros": None if codes.grid.symmetric else z}
            for c, s, z in zip(*parts, strict=True)
        ]

    def sums(self, rows: Tensor) -> list[float]:
        """Sum numbers (L, rows) over the rows of each layer."""
        return [float(part.sum()) for part in self._by_layer(rows.double())]

    def _by_layer(self, rows: Tensor) -> list[NDArray[Any]]:
        host, out = rows.cpu().numpy(), []
        for layers, of_input in zip(self.inputs, host, strict=True):
            ends = np.cumsum([len(p.target) for p in layers])
            out += [np.ascontiguousarray(part) for part in np.split(of_input, ends[:-1])]
        return out


@dataclass(frozen=True)
class Twin:
    """A solver on a device.

    Parameters
    ----------
    damping : Damping
        Damping that gives mu.
    order : {"natural", "diagonal", "conditional"}
        Order of the columns. The settings describe the three kinds.
    search : {"max", "half-range", "mse"}
        Search for scales.
    """

    damping: Damping
    order: Order
    search: ScaleSearch = "mse"

    def solve(self, problems: Sequence[Problem]) -> list[Found]:
        """Solve layers and return the core's results for each, in their order.

        Raises
        ------
        SolveError, NonFiniteError, OutOfMemoryError
            The message names the layer.
        ConfigError
            This process rounds float32 products.
        """
        require_float32()
        results: dict[int, Found] = {}
        for batch in batches(problems, joined=self.joined):
            try:
                with torch.no_grad():
                    solved = self.run(batch)
            except torch.OutOfMemoryError as cause:
                reason = str(cause).split(".", 1)[0]
                raise OutOfMemoryError(
                    f"layer {batch.names[0]} and {len(batch.problems) - 1} more: {reason}: end other programs on "
                    f"{batch.device}, or give --device cpu"
                ) from cause
            results.update((id(p), one) for p, one in zip(batch.problems, solved, strict=True))
        return [results[id(p)] for p in problems]

    @property
    def joined(self) -> bool:
        """Whether layers with one input share S."""
        return True

    def run(self, batch: LayerBatch) -> list[Found]:
        """Solve the layers of a batch."""
        raise NotImplementedError(type(self).__name__)


@dataclass(frozen=True)
class Gptq(Twin):
    """`loopq._native.gptq`."""

    scales: Literal["group", "static"] = "group"
    precision: str = "float64"

    def run(self, batch: LayerBatch) -> list[Found]:
        """Solve the layers of a batch."""
        hessians = [layers[0].require_observed() for layers in batch.inputs]
        factors = batch.factors(hessians, self.damping, self.order, self.precision)
        codes, target = batch.codes(self.search, signed=False), batch.target()
        known = fitted(target, factors, codes, batch.names) if self.scales == "static" else None
        swept = sweep(factors.in_order(target), factors, codes, known)
        refuse_scales(swept.scale, batch.names, codes)
        results = batch.found(codes, factors.back(swept.codes), swept.scale, swept.zero)
        facts = [
            {
                "damping_abs": float(mu.max()),
                "n_dead_columns": int((np.diag(h) == 0).sum()),
                "min_pivot": float(pivots.min()),
                "max_pivot": float(pivots.max()),
            }
            for layers, h, mu, pivots in zip(batch.inputs, hessians, factors.mu, factors.pivots, strict=True)
            for _ in layers
        ]
        losses = zip(batch.sums(swept.damped), batch.sums(swept.added), strict=True)
        return [
            one | more | {"proxy": max(damped - added, 0.0), "proxy_damped": damped}
            for one, more, (damped, added) in zip(results, facts, losses, strict=True)
        ]


@dataclass(frozen=True)
class GptqCd(Twin):
    """`loopq._native.gptq_cd`; with `passes`, `loopq._native.coupled`."""

    signed: bool = True
    n_paths: int = 1
    sweeps: int = 30
    rounds: int = 1
    refit: bool = True
    passes: int | None = None

    @property
    def joined(self) -> bool:
        """Whether layers with one input share S. With the loop metric each layer has its own S."""
        return self.passes is None

    def run(self, batch: LayerBatch) -> list[Found]:
        """Solve the layers of a batch."""
        codes = batch.codes(self.search, self.signed)
        stages = Stages(codes, self.n_paths, self.sweeps, self.rounds, self.refit, batch.names)
        if self.passes is not None:
            return self._coupled(batch, stages, self.passes)
        hessians = [layers[0].require_observed() for layers in batch.inputs]
        factors = batch.factors(hessians, self.damping, self.order, "float64")
        target = batch.target()
        height = max(1, _room(batch.device) // (ROW_BYTES * target[:, 0].numel()))
        solved = joined([settle(rows, factors, stages) for rows in target.split(height, 1)])
        facts = zip(*(batch.sums(x) for x in (solved.swept, solved.settled, solved.moves)), strict=True)
        return [
            one
            | {
                "proxy_swept": swept,
                "proxy_settled": settled,
                "n_moves": int(moves),
                "n_rounds": solved.rounds,
            }
            for one, (swept, settled, moves) in zip(
                batch.found(codes, solved.codes, solved.scale, solved.zero), facts, strict=True
            )
        ]

    def _coupled(self, batch: LayerBatch, stages: Stages, passes: int) -> list[Found]:
        device, sides = batch.device, [(p, *_sides(p)) for p in batch.problems]
        factors = batch.factors([s for _, s, _ in sides], self.damping, self.order, "float64")
        blocks = [torch.from_numpy(np.stack(b)).to(device) for b in zip(*(a for *_, a in sides), strict=True)]
        solved = coupled(batch.target(), factors, Left.of(blocks, batch.names), stages, passes)
        losses = zip(batch.problems, solved.swept, solved.settled, solved.replaced, strict=True)
        facts = [
            {
                "coupled_swept": float(swept),
                "coupled_settled": float(settled),
                "n_replaced": int(replaced),
                "metric": "loop",
                "metric_gradients": p.metric.n_gradients if p.metric else 0,
            }
            for p, swept, settled, replaced in losses
        ]
        results = batch.found(stages.codes, solved.codes, solved.scale, solved.zero)
        return [one | more for one, more in zip(results, facts, strict=True)]


def _sides(problem: Problem) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """Return the undamped S and the blocks of A of a layer."""
    metric = problem.require_metric()
    combined = metric.combined(problem.require_observed())
    return combined, metric.floored(problem.target, combined)


def batches(problems: Sequence[Problem], *, joined: bool) -> Iterator[LayerBatch]:
    """Divide layers into batches. With `joined`, layers with the same Hessian form one input."""
    inputs: dict[tuple[int, Any], list[Problem]] = {}
    for p in problems:
        key = id(p.hessian) if joined else id(p)
        inputs.setdefault((key, (p.grid, p.settings.scale_bits, p.device)), []).append(p)
    alike: dict[Any, list[list[Problem]]] = {}
    for (_, grid), layers in inputs.items():
        shape = sum(len(p.target) for p in layers), layers[0].target.shape[1]
        alike.setdefault((grid, shape), []).append(layers)
    for ((*_, device), shape), groups in alike.items():
        rows, columns = shape
        # S, its factor and temporaries; targets, errors and gradients.
        most = max(1, _room(torch.device(device)) // (8 * 6 * columns**2 + 72 * rows * columns))
        for first in range(0, len(groups), most):
            yield LayerBatch(groups[first : first + most])


def _room(device: torch.device) -> int:
    free = device_bytes(device)
    return BYTES if free is None else free // 2
