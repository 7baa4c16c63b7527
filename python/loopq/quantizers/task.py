"""One layer of a run: its settings, its steps, and its input group."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from loopq.layers.shared import SharedParameter
from loopq.quantizers.config import LayerConfig
from loopq.quantizers.loop_metric import LoopMetric

MetricKey = tuple[str, tuple[int, ...], tuple[int | None, int] | None]
#: Loop metrics of layers by `Task.metric_key`; None for experts that receive no gradient.
Metrics = Mapping[MetricKey, LoopMetric | None]


class Pool(NamedTuple):
    """Gradient sums that experts share, between the inputs or outputs of all; named after their first parameter."""

    side: Literal["inputs", "outputs"]
    name: str


@dataclass(frozen=True)
class Task:
    """One layer to quantize.

    Parameters
    ----------
    parameter : SharedParameter
        The weight.
    config : LayerConfig
        Settings of this layer.
    steps : tuple of int
        Steps of the summed Hessian. The tuple is empty when the layer is not observed.
    input_group : str or None
        Key of its Hessian: the first parameter that reads the same input. It is None without activations.
    pool : Pool or None
        The side of the loop metric that the experts of its block share. Its other side has no gradients.
    """

    parameter: SharedParameter
    config: LayerConfig
    steps: tuple[int, ...]
    input_group: str | None
    pool: Pool | None = None

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return self.parameter.name

    @property
    def step_weights(self) -> str:
        """Weighting of the steps."""
        return self.config.calibration.step_weights

    @property
    def gradients(self) -> tuple[int | None, int] | None:
        """Maximum prompts (None: a share) and label draws of the layer's loop metric; None without one."""
        return self.config.method.gradients if self.input_group else None

    @property
    def side(self) -> Literal["", "inputs", "outputs"]:
        """The shared side of its loop metric, if there is one."""
        return self.pool.side if self.pool else ""

    @property
    def metric_name(self) -> str:
        """Name of its gradient sums."""
        return self.pool.name if self.pool else self.name

    def plain(self) -> Task:
        """Return the task without gradients."""
        return dataclasses.replace(self, config=self.config.changed(metric="inputs"), pool=None)

    @property
    def as_solved(self) -> Task:
        """The task as its solver sees it: experts that share their inputs' side are solved row by row."""
        return self.plain() if self.side == "inputs" and self.gradients else self

    @property
    def metric_key(self) -> MetricKey:
        """Key of a loop metric within one collection: layer, steps, prompts and draws."""
        return self.metric_name, self.steps, self.gradients
