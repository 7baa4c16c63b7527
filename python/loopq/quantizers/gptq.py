"""GPTQ: columns rounded one by one, each error spread over the columns still to come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

import loopq._native as native
from loopq.checkpoint.layer import QuantizedLayer
from loopq.errors import ConfigError, SolveError
from loopq.quantizers import QUANTIZERS, Method, Problem
from loopq.quantizers.damping import Damping
from loopq.quantizers.rtn import ScaleSearch
from loopq.settings import block, setting


@QUANTIZERS.register("gptq")
@dataclass(frozen=True)
class GPTQ(Method):
    """Column by column, each rounding error made up for by the columns to come.

    Minimises tr(D H D^T), D = W^ - W, with H summed over the steps chosen.
    A Hessian that cannot be factored at the damping asked for is an error: damping is never raised and rounding never
    put in its place unasked.

    Parameters
    ----------
    damping : Damping
        What is added to the diagonal of H.
    scales : {"group", "static"}
        When a group's scale is taken. group: from the compensated weights when the column sweep reaches the group, as
        published; static: from the original weights, before the sweep.
    scale_search : {"max", "mse"}
        Scale of a group: that of its largest magnitude, or that of least squared error on a shrink grid.
    act_order : bool
        Sweep columns by falling diag(H). Scales must be static then, and no index is stored.
    precision : {"float64", "float32"}
        Arithmetic of factorisation and sweep.
    block_size : int
        Columns swept before the trailing update; it changes speed, never a code.
    """

    name: ClassVar[str] = "gptq"
    damping: Damping = block(Damping, "damping")
    scales: Literal["group", "static"] = setting("group")
    scale_search: ScaleSearch = setting("mse")
    act_order: bool = setting(False)
    precision: Literal["float64", "float32"] = setting("float64")
    block_size: int = setting(128, at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.act_order and self.scales != "static":
            raise ConfigError(
                "act_order needs static scales: the groups of the file are those of the columns in order"
            )

    def quantize(self, problem: Problem) -> QuantizedLayer:
        """Quantize a layer."""
        hessian, damping = problem.observed, self.damping.fraction
        if self.damping.kind != "mean":
            mu = self.damping.vector(hessian, problem.threads)
            hessian, damping = hessian + np.diag(mu), 0.0
        grid = problem.grid
        try:
            result = native.gptq(
                problem.target,
                hessian,
                bits=grid.bits,
                group_size=grid.core_group_size,
                symmetric=grid.symmetric,
                damping=damping,
                precision=self.precision,
                scale_dtype=grid.core_scale_dtype,
                scales=self.scales,
                scale_search=self.scale_search,
                act_order=self.act_order,
                block_size=self.block_size,
                energy=False,
                threads=problem.threads,
            )
        except SolveError as cause:
            raise SolveError(f"layer {problem.name}: {cause}") from cause
        # The order of columns is an array, and a report is plain data.
        return problem.layer({k: v for k, v in result.items() if k != "order"}, self.name)
