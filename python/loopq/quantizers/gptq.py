"""GPTQ: columns are rounded one by one, and each error is spread over the remaining columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import loopq._native as native
from loopq.errors import ConfigError, naming
from loopq.layers.grid import ScaleSearch
from loopq.layers.layer import QuantizedLayer
from loopq.quantizers import QUANTIZERS, Method, Problem
from loopq.quantizers.damping import Damping, PublishedDamping
from loopq.settings.declare import block, setting


@QUANTIZERS.register("gptq")
@dataclass(frozen=True)
class GPTQ(Method):
    """Column by column, with each rounding error compensated in the columns that follow.

    Minimises tr(D H D^T), D = W^ - W, with H summed over the chosen steps. If the damped Hessian cannot be factored,
    GPTQ raises an error. It neither raises the damping nor falls back to rounding.

    Parameters
    ----------
    damping : Damping
        Damping added to the diagonal of H.
    scales : {"group", "static"}
        When a group's scale is computed. `group` uses the compensated weights when the sweep reaches the group, as
        published. `static` uses the original weights, before the sweep.
    scale_search : {"max", "half-range", "mse"}
        Scale of a group. `max` gives the largest magnitude the highest code. `half-range` places it half the code range
        from zero. `mse` takes the scale of least squared error on a shrink grid.
    act_order : bool
        Sweep columns by falling diag(H). This requires static scales, and no index is stored.
    precision : {"float64", "float32"}
        Arithmetic of factorisation and sweep.
    block_size : int
        Columns swept before the trailing update. It changes the speed, but never a code.
    """

    has_twin: ClassVar[bool] = True
    damping: Damping = block(Damping, "damping")
    scales: Literal["group", "static"] = setting("group")
    scale_search: ScaleSearch = setting("mse")
    act_order: bool = setting(False)
    precision: Literal["float64", "float32"] = setting("float64")
    block_size: int = setting(native.BLOCK_SIZE, at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.act_order and self.scales != "static":
            raise ConfigError(
                "act_order needs static scales: the groups of the file are those of the columns in order"
            )

    def quantize(self, problem: Problem) -> QuantizedLayer:
        """Quantize a layer."""
        problem.require_observed()
        with naming(problem.name):
            factor = problem.factor(self._published, self._order, self.precision)
            result = native.gptq(
                problem.target,
                factor,
                problem.core(scale_search=self.scale_search),
                scales=self.scales,
                block_size=self.block_size,
                threads=problem.threads,
            )
        return problem.layer(result, self.name)

    def twin(self, problems: Sequence[Problem]) -> list[dict[str, Any]]:
        """Solve layers on their device."""
        from loopq.quantizers.twin.solve import Gptq  # lazy: loopq imports without torch

        return Gptq(
            self._published, self._order, self.scale_search, scales=self.scales, precision=self.precision
        ).solve(problems)

    @property
    def _published(self) -> Damping:
        return PublishedDamping(self.damping.fraction, self.damping.kind)

    @property
    def _order(self) -> Literal["diagonal", "natural"]:
        return "diagonal" if self.act_order else "natural"
