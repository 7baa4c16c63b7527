"""The codes of this folder as quantizers, so that loopq's own run calibrates for them: layer by layer, asymmetric."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from benches.next.sides import Coder, Matrix, TwoSided, solve
from benches.next.vectors import Vectors, lattice, levels
from loopq.checkpoint.layer import QuantizedLayer
from loopq.quantizers import QUANTIZERS, Problem
from loopq.quantizers.damping import Damping
from loopq.quantizers.gptq_cd import GPTQCD
from loopq.quantizers.loop_metric import FLOOR
from loopq.settings import setting


@dataclass(frozen=True, kw_only=True)
class CodedLayer(QuantizedLayer):
    """A layer whose values are no integers times a scale; `codes` are zero and stand for its bytes alone."""

    values: NDArray[np.float32]

    def stored_values(self) -> NDArray[np.float32]:
        """The values."""
        return self.values


def left_of(problem: Problem, combined: Matrix) -> Matrix:
    """A with the floor under each row's weight (`docs/loop-metric.md`, (7)); blocks of rows uncoupled."""
    metric = problem.metric
    assert metric is not None
    size = np.square(problem.target, dtype=np.float64) @ np.diag(combined)
    rows = len(size)
    out, first = np.zeros((rows, rows)), 0
    for block in metric.left:
        out[first : first + len(block), first : first + len(block)] = block
        first += len(block)
    mean = float(np.mean(np.diag(out) * size))
    return out + np.diag(np.divide(FLOOR * mean, size, out=np.zeros_like(size), where=size > 0))


class _Coded(GPTQCD):
    """The loop metric, damping and asymmetric target of preset best, with another code."""

    factor: float

    @property
    def shift_damping(self) -> Damping:
        """Of the mean: a channel that is nearly silent must not get a target far beyond what any code reaches."""
        return Damping(0.01, "mean")

    def coder(self, problem: Problem, left: Matrix) -> Coder:
        """The code for one layer."""
        raise NotImplementedError

    def quantize(self, problem: Problem) -> QuantizedLayer:
        """Quantize a layer."""
        assert problem.metric is not None
        combined = problem.metric.combined(problem.require_observed())
        right = combined + np.diag(self.damping.vector(combined, problem.threads))
        left = left_of(problem, combined)
        group = problem.grid.width(problem.target.shape[1])
        sides = TwoSided(problem.target.astype(np.float64), left, right, group)
        steps: list[tuple[str, float]] = []
        codes, scales = solve(
            sides, self.coder(problem, left), self.factor, self.passes, lambda *x: steps.append(x)
        )
        values = (codes * scales[:, sides.groups]).astype(np.float32)
        plain: dict[str, Any] = {
            "codes": np.zeros(values.shape, dtype=np.int8),
            "scales": scales.astype(np.float32),
            "zeros": None,
            "loss": steps,
        }
        layer = problem.layer(plain, self.name)
        fields = {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer)}
        return CodedLayer(**fields, values=values)


@QUANTIZERS.register("vectors")
@dataclass(frozen=True)
class VectorMethod(_Coded):
    """A table of vectors down the outputs.

    Parameters
    ----------
    factor : float
        First scales, in root mean squares of a group.
    """

    name: ClassVar[str] = "vectors"
    factor: float = setting(1.0, at_least=0.0)

    def coder(self, problem: Problem, left: Matrix) -> Coder:
        """The table for one layer."""
        return Vectors(left, lattice(problem.grid.bits))


@QUANTIZERS.register("levels")
@dataclass(frozen=True)
class LevelMethod(VectorMethod):
    """The levels of the uniform grid, one output at a time: what the solver of this folder does without a new code."""

    name: ClassVar[str] = "levels"

    def coder(self, problem: Problem, left: Matrix) -> Coder:
        """The levels for one layer."""
        return Vectors(left, levels(problem.grid.bits))


@QUANTIZERS.register("gptq-cd-shift")
@dataclass(frozen=True)
class DampedShift(GPTQCD):
    """gptq-cd on the uniform grid with the asymmetric target of the codes: what of their gain that target is."""

    name: ClassVar[str] = "gptq-cd-shift"
    shift_damping = _Coded.shift_damping
