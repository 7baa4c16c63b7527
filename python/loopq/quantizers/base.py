"""Input and output of a quantizer."""

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
from loopq.quantizers.grid import EVEN, GridSettings
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
        Values that the codes approximate. Outputs come first for every model storage. The target is the weight, or the
        shifted target of asymmetric calibration.
    hessian : ndarray, float64, shape (in_features, in_features), or None
        H = X^T X over the rows of the chosen steps. It is None when the layer is not observed.
    settings : GridSettings
        Settings of the grid of the codes.
    orientation : {"out_in", "in_out"}
        Order in which the model stores the weight. The codes do not depend on it.
    threads : int
        Threads; 0 takes all cores. Their number changes no code.
    shared : dict
        Cache of the input group. It holds results that depend on H alone, such as its factor.
    metric : LoopMetric, optional
        Loop metric of the layer, for methods that use gradients.
    device : str
        The model's device. On devices other than the CPU the method's torch twin solves, if there is one.
    """

    name: str
    target: NDArray[np.float32]
    hessian: NDArray[np.float64] | None
    settings: GridSettings
    orientation: str = "out_in"
    threads: int = 0
    shared: dict[Any, Any] = field(default_factory=dict)
    metric: LoopMetric | None = None
    device: str = "cpu"

    @cached_property
    def grid(self) -> Grid:
        """The grid of the codes, fitted to the target if the grid is of a fitted kind."""
        energies = None if self.hessian is None else np.diag(self.hessian).copy()
        return self.settings.make().fitted(self.target, energies, self.threads)

    @property
    def is_common(self) -> bool:
        """Whether each code has its own value, and scales have a type that torch rounds to."""
        grid = self.grid
        return grid.plain and grid.own_scales and grid.scale_dtype in SCALE_DTYPES

    def core(self, *, scale_search: ScaleSearch, signed: bool = False) -> native.Grid:
        """Return the grid for the core, with its scale search; `signed` allows negative scales."""
        return self.grid.core(scale_search=scale_search, signed=signed, scale_bits=self.settings.scale_bits)

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
        """Compute a result that depends on H alone once for all layers of the input group."""
        if key not in self.shared:
            self.shared[key] = make()
        result: T = self.shared[key]
        return result

    def layer(self, result: Mapping[str, Any], method: str, grid: Grid | None = None) -> QuantizedLayer:
        """Build the layer from the core's codes, scales and zeros; the rest goes to the report.

        `grid` is a grid of the method's own, instead of the one that the settings give.
        """
        report = {k: v for k, v in result.items() if k not in ("codes", "scales", "zeros")}
        if grid is None and self.settings.levels not in EVEN:
            report["levels"] = self.settings.levels
        return QuantizedLayer(
            name=self.name,
            grid=grid or self.grid,
            codes=result["codes"],
            scales=result["scales"],
            zeros=result["zeros"],
            orientation=self.orientation,
            report={"method_done": method, **report},
        )


def has_twins(device: str) -> bool:
    """Whether a device has solver twins: it is not the core's, and it supports double precision."""
    return device.split(":")[0] not in ("cpu", "mps", "meta")


class Method(Chosen):
    """A quantizer with its settings: a frozen dataclass with one field for each setting.

    Attributes
    ----------
    needs_hessian : bool
        Whether the method requires `Problem.hessian`. If so, the layer must be observed.
    rounds_as_published : bool
        Whether the method also rounds the weights that the paper rounds to nearest in every variant (Li, App. Q).
    transforms : bool
        Whether the codes are for a transformed input.
    folds : bool
        Whether layers of one input share a transform, which the layer before takes in an export (`FOLDINGS`).
    in_other_formats : str
        Method that replaces it where another format than loopq's own is written. Empty for the method itself.
    has_twin : bool
        Whether `twin` solves on devices other than the CPU, for plain grids and common scale types.
    prefers_uneven : bool
        Whether levels "auto" are uneven.
    prefers_rotation : bool
        Whether rotation "auto" tries to rotate the input.
    """

    needs_hessian: ClassVar[bool] = True
    rounds_as_published: ClassVar[bool] = True
    transforms: ClassVar[bool] = False
    folds: ClassVar[bool] = False
    in_other_formats: ClassVar[str] = ""
    has_twin: ClassVar[bool] = False
    prefers_uneven: ClassVar[bool] = False
    prefers_rotation: ClassVar[bool] = False

    @property
    def gradients(self) -> tuple[int | None, int] | None:
        """Maximum prompts (None: all) and label draws per prompt of the loop metric; None without one."""
        return None

    @property
    def work(self) -> tuple[float, float, float]:
        """Cost of a solve in multiply-adds of one accumulation: factors of in^3 (per input), out in^2, out in."""
        return (1.0, 8.0, 0.0) if self.needs_hessian else (0.0, 0.0, 0.0)

    @property
    def memory(self) -> tuple[int, int]:
        """Peak memory of a solve: in x in matrices in double precision, and copies of the weight in single.

        The matrices are H and its factor. The copies are the weight, codes and dequantized codes for the report.
        """
        return (2, 3) if self.needs_hessian else (0, 3)

    @property
    def shift_damping(self) -> Damping:
        """Damping of the system for the target of asymmetric calibration: the method's own if it has one."""
        damping: Damping = getattr(self, "damping", Damping())
        return damping

    def make_grid(self, settings: GridSettings) -> Grid:
        """Return the grid of the codes, as far as it is known before a solve. Few methods have one of their own."""
        return settings.make()

    def check(self, grid: GridSettings) -> None:  # most methods take every grid
        """Refuse a grid that the method does not support.

        Raises
        ------
        ConfigError
            The message names the unsupported part of the grid.
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
        """Solve layers on their device and return the core's results for each. Only methods with a twin have it."""
        raise NotImplementedError(type(self).__name__)

    def quantize_all(self, problems: Sequence[Problem]) -> list[QuantizedLayer]:
        """Quantize layers. The core solves them one by one; the torch twin solves them together.

        On a device with twins, the report of a layer says where it was solved.

        Raises
        ------
        SolveError
            As in `quantize`.
        """
        theirs = [p for p in problems if self.has_twin and has_twins(p.device) and p.is_common]
        solved = self.twin(theirs) if theirs else []
        by_id = {id(p): p.layer(one, self.name) for p, one in zip(theirs, solved, strict=True)}
        layers = []
        for p in problems:
            with naming(p.name):
                layer = by_id[id(p)] if id(p) in by_id else self.quantize(p)
            if has_twins(p.device):
                layer = layer.with_report(solved_on=p.device.split(":")[0] if id(p) in by_id else "cpu")
            layers.append(layer)
        return layers
