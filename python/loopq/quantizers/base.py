"""What a quantizer is given and what it gives back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.errors import SolveError, naming
from loopq.layers.grid import SCALE_DTYPES, Grid, ScaleSearch
from loopq.layers.layer import QuantizedLayer
from loopq.quantizers.damping import Damping
from loopq.quantizers.grid import GridSettings
from loopq.quantizers.loop_metric import LoopMetric
from loopq.settings.declare import Chosen

T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """One layer to quantize.

    Parameters
    ----------
    name : str
        Name of the parameter.
    target : ndarray, float32, shape (out_features, in_features)
        What the codes should stand for, outputs first whatever the model's storage: the weight, or the shifted target
        of asymmetric calibration.
    hessian : ndarray, float64, shape (in_features, in_features), or None
        H = X^T X over the rows of the steps chosen; None where the layer is not observed.
    grid : GridSettings
        Grid of the codes.
    orientation : {"out_in", "in_out"}
        How the model stores the weight.
    threads : int
        Threads; 0 takes all cores. It changes no code.
    shared : dict
        Cache of the input group: what depends on H alone (its factor) is computed once and stored here.
    metric : LoopMetric, optional
        Loop metric of the layer, for methods that ask for gradients.
    device : str
        The model's device. On another than the CPU a method's twin in torch solves, where it has one.
    """

    name: str
    target: NDArray[np.float32]
    hessian: NDArray[np.float64] | None
    grid: GridSettings
    orientation: str = "out_in"
    threads: int = 0
    shared: dict[Any, Any] = field(default_factory=dict)
    metric: LoopMetric | None = None
    device: str = "cpu"

    @cached_property
    def codes_on(self) -> Grid:
        """The grid of the codes, fitted to the target where it is of that kind."""
        energies = None if self.hessian is None else np.diag(self.hessian).copy()
        return self.grid.grid().fitted(self.target, energies, self.threads)

    @property
    def is_common(self) -> bool:
        """Whether the codes have values of their own and scales of a type that torch rounds to."""
        found = self.codes_on
        return found.plain and found.own_scales and found.scale_dtype in SCALE_DTYPES

    def core(self, *, scale_search: ScaleSearch, signed: bool = False) -> native.Grid:
        """Return that grid as the core takes it, with the search for its scales; `signed` lets them be negative."""
        return self.codes_on.core(scale_search=scale_search, signed=signed, scale_bits=self.grid.scale_bits)

    def require_observed(self) -> NDArray[np.float64]:
        """Return the Hessian, or refuse a layer without one.

        Raises
        ------
        SolveError
            No activation of this layer was collected.
        """
        if self.hessian is None:
            raise SolveError(f"layer {self.name}: needs the layer's activations, and none were collected")
        return self.hessian

    def require_metric(self) -> LoopMetric:
        """Return the loop metric, or refuse a layer without one.

        Raises
        ------
        SolveError
            No gradients of this layer were collected.
        """
        if self.metric is None:
            raise SolveError(
                f"layer {self.name}: metric 'loop' needs gradients through the loop, and none were collected"
            )
        return self.metric

    def factor(
        self,
        damping: Damping,
        order: Literal["natural", "diagonal", "conditional"] = "natural",
        precision: Literal["float64", "float32"] = "float64",
    ) -> native.DampedFactor:
        """Return S = H + diag(mu), factored once for all layers of the input group.

        Parameters
        ----------
        damping : Damping
            Gives mu.
        order : {"natural", "diagonal", "conditional"}
            Order of the columns.
        precision : {"float64", "float32"}
            Arithmetic of the factor.

        Raises
        ------
        SolveError
            No activation of this layer was collected, or S cannot be factored.
        """

        def make() -> native.DampedFactor:
            hessian = self.require_observed()
            mu = damping.vector(hessian, self.threads)
            return native.DampedFactor(hessian, mu, order=order, precision=precision, threads=self.threads)

        return self.once(("factor", damping, order, precision), make)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """Return what depends on H alone, computed once for all layers of the input group."""
        if key not in self.shared:
            self.shared[key] = make()
        found: T = self.shared[key]
        return found

    def layer(self, result: Mapping[str, Any], method: str, **more: Any) -> QuantizedLayer:
        """Build the layer from what the core gave: codes, scales, zeros; the rest goes to the report.

        `more` is what a grid of its own kind has besides the settings (`GridSettings.grid`).
        """
        report = {k: v for k, v in result.items() if k not in ("codes", "scales", "zeros")}
        if self.grid.levels != "even":
            report["levels"] = self.grid.levels
        return QuantizedLayer(
            name=self.name,
            grid=self.grid.grid(**more) if more else self.codes_on,
            codes=result["codes"],
            scales=result["scales"],
            zeros=result["zeros"],
            orientation=self.orientation,
            report={"method_done": method, **report},
        )


def has_twins(device: str) -> bool:
    """Whether solvers have twins on a device: one that is not the core's, and has double precision."""
    return device.split(":")[0] not in ("cpu", "mps", "meta")


class Method(Chosen):
    """A quantizer with its settings: a frozen dataclass whose fields are what the method can be told.

    Attributes
    ----------
    needs_hessian : bool
        Whether `Problem.hessian` must be there.
    rounds_as_published : bool
        Whether a weight that the paper rounds to nearest in every variant (Li, App. Q) is rounded by this method too.
    has_twin : bool
        Whether `twin` solves on other devices than the CPU, on plain grids with scales of a common type.
    """

    needs_hessian: ClassVar[bool] = True
    rounds_as_published: ClassVar[bool] = True
    has_twin: ClassVar[bool] = False

    @property
    def gradients(self) -> tuple[int | None, int] | None:
        """Most prompts (None: all), and label draws for each, that the loop metric takes; None without one."""
        return None

    @property
    def work(self) -> tuple[float, float, float]:
        """Multiply-adds of a solve, in those of an accumulation: factors of in^3 (once per input), out in^2, out in."""
        return (1.0, 8.0, 0.0) if self.needs_hessian else (0.0, 0.0, 0.0)

    @property
    def memory(self) -> tuple[int, int]:
        """What a solve holds at its peak: matrices of in x in in double precision, copies of the weight in single.

        H and its factor; the weight, codes, and dequantized ones for the report.
        """
        return (2, 3) if self.needs_hessian else (0, 3)

    @property
    def shift_damping(self) -> Damping:
        """Damping of the system that asymmetric calibration solves for its target: the method's, if it has one."""
        found: Damping = getattr(self, "damping", Damping())
        return found

    def check(self, grid: GridSettings) -> None:  # most methods take every grid
        """Refuse a grid that the method has no codes for.

        Raises
        ------
        ConfigError
            Names what of the grid it cannot have.
        """

    @abstractmethod
    def quantize(self, problem: Problem) -> QuantizedLayer:
        """Quantize a layer.

        Raises
        ------
        SolveError
            The layer cannot be solved; the message gives layer, reason and advice.
        """

    def twin(self, problems: Sequence[Problem]) -> list[dict[str, Any]]:
        """Solve layers on their device; what the core says of each. Of methods that have a twin."""
        raise NotImplementedError(type(self).__name__)

    def quantize_all(self, problems: Sequence[Problem]) -> list[QuantizedLayer]:
        """Quantize layers: by the core one after the other, by its twin in torch together.

        Where a device has twins, the report of a layer says where it was solved.

        Raises
        ------
        SolveError
            As of `quantize`.
        """
        theirs = [p for p in problems if self.has_twin and has_twins(p.device) and p.is_common]
        solved = self.twin(theirs) if theirs else []
        found = {id(p): p.layer(one, self.name) for p, one in zip(theirs, solved, strict=True)}
        layers = []
        for p in problems:
            with naming(p.name):
                layer = found[id(p)] if id(p) in found else self.quantize(p)
            if has_twins(p.device):
                layer = layer.with_report(solved_on=p.device.split(":")[0] if id(p) in found else "cpu")
            layers.append(layer)
        return layers
