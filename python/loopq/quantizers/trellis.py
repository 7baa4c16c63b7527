"""Codes on a bitshift trellis: the least error for 2 and 3 bits, in loopq's own format only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

import loopq._native as native
from loopq.errors import ConfigError, naming
from loopq.layers.grids.trellis import OnTrellis, Trellis
from loopq.layers.layer import QuantizedLayer
from loopq.quantizers import QUANTIZERS, Method, Problem
from loopq.quantizers.damping import Damping
from loopq.quantizers.gptq_cd import GPTQCD, MetricSettings, sides
from loopq.quantizers.grid import EVEN, GridSettings
from loopq.quantizers.loop_metric import BLOCK
from loopq.settings.declare import block, setting

#: With fewer outputs the joined ends of a stream may cost more than the trellis gains. Over six random weights the loss
#: was 1.42 times that of gptq-cd with 8 outputs, 0.73 with 16, 0.67 with 32 (`tests/quantizers/test_trellis.py`).
FEW = 16
#: Multiply-adds per search state and weight, and per open path and weight where outputs are coupled. Measured against
#: those of the search before it on one thread of a Zen 4.
STATE_WORK, PATH_WORK = 7.0, 400.0
#: Open paths where outputs are coupled.
OPEN = 1024


@QUANTIZERS.register("trellis")
@dataclass(frozen=True)
class TrellisMethod(Method):
    """Codes on a bitshift trellis: values depend on several codes, at the same bytes. No other tool reads them.

    Parameters
    ----------
    metric : MetricSettings
        Cost of an error.
    damping : Damping
        Damping added to the diagonal of H.
    state_bits : int, optional
        Bits of the stream that a value depends on. Each additional bit lowers the error; from 13 on it doubles the
        search time. When absent 15, or 12 with metric loop, whose search costs more for each bit.

    Notes
    -----
    Minimises tr(A D S D^T) as gptq-cd does (A = 1 with metric inputs), with the same S and A. Columns are coded one by
    one by falling conditional energy. Viterbi's algorithm codes each column down the outputs. Its targets are the
    weights, corrected for the errors of earlier columns. The scales are solved for last (docs/formats/trellis.md).

    References
    ----------
    A. Tseng, Q. Sun, D. Hou, C. De Sa, *QTIP: Quantization with Trellises and Incoherence Processing*, 2024,
    arXiv:2406.11235.
    """

    rounds_as_published: ClassVar[bool] = False
    prefers_rotation: ClassVar[bool] = True
    metric: MetricSettings = block(MetricSettings, "metric")
    damping: Damping = block(Damping, "damping", kind="diagonal")
    state_bits: int | None = setting(None, at_least=4, at_most=16)

    @property
    def gradients(self) -> tuple[int | None, int] | None:
        """Maximum prompts (None: a share) and label draws per prompt, with metric loop."""
        return (self.metric.prompts, self.metric.draws) if self.metric.kind == "loop" else None

    @property
    def n_state_bits(self) -> int:
        """Bits of the stream that a value depends on."""
        if self.state_bits is not None:
            return self.state_bits
        return 12 if self.metric.kind == "loop" else 15

    @property
    def work(self) -> tuple[float, float, float]:
        """An inverse and its pivots besides the factor, feedback and scales, and the states of every weight."""
        paths = min(OPEN, 1 << (self.n_state_bits - 2)) if self.metric.kind == "loop" else 0
        return 4.0, 16.0, STATE_WORK * (1 << self.n_state_bits) + PATH_WORK * paths

    @property
    def memory(self) -> tuple[int, int]:
        """Damped and combined H; also errors, gradient and values in double precision."""
        return 4, 10

    @property
    def shift_damping(self) -> Damping:
        """Damping of kind mean: a nearly silent channel must not get a target that no stream reaches."""
        return Damping(self.damping.fraction, "mean")

    def check(self, grid: GridSettings) -> None:
        """Refuse a grid without a trellis.

        Raises
        ------
        ConfigError
            Unsupported bits or symmetry, or too few state bits.
        """
        if grid.bits == 8 or not grid.symmetric or grid.levels not in EVEN:
            kind = (
                f"{grid.bits} bits, {'symmetric' if grid.symmetric else 'asymmetric'}, levels {grid.levels}"
            )
            raise ConfigError(
                f"method trellis codes 2, 3 or 4 bits with even levels, no zero points; got {kind}"
            )
        if self.n_state_bits < grid.bits + 2:
            raise ConfigError(
                f"state_bits must be at least {grid.bits + 2} for {grid.bits} bits; got {self.n_state_bits}"
            )

    def make_grid(self, settings: GridSettings) -> OnTrellis:
        """Return the trellis."""
        trellis = Trellis(self.n_state_bits, BLOCK)
        return OnTrellis(settings.bits, settings.group_size, settings.scale_dtype, trellis)

    def quantize(self, problem: Problem) -> QuantizedLayer:
        """Quantize a layer. With fewer than 16 outputs gptq-cd solves it, with the same metric and damping."""
        problem.require_observed()
        rows = len(problem.target)
        if rows < FEW:
            return GPTQCD(metric=self.metric, damping=self.damping).quantize(problem)
        with naming(problem.name):
            if self.metric.kind == "loop":
                factor, left, facts = sides(problem, self.damping, "conditional", "natural")
            else:
                factor = problem.factor(self.damping, "conditional")
                sizes = [min(BLOCK, rows - i) for i in range(0, rows, BLOCK)]
                left = [native.DampedFactor(np.eye(n), np.zeros(n), order="natural") for n in sizes]
                facts = {}
            grid = self.make_grid(problem.settings)
            core = grid.core(scale_search="mse")
            solved = native.trellis(problem.target, factor, left, core, threads=problem.threads)
        return problem.layer(solved | facts, self.name, grid)
