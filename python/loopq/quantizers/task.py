"""One layer of a run: its settings, its steps, and its input group."""

from __future__ import annotations

from dataclasses import dataclass

from loopq.layers.shared import SharedParameter
from loopq.quantizers.config import LayerConfig
from loopq.quantizers.loop_metric import LoopMetric

MetricKey = tuple[str, tuple[int, ...], tuple[int | None, int] | None]
#: Loop metrics of layers by `Task.metric_key`; None for experts that receive no gradient.
Metrics = dict[MetricKey, LoopMetric | None]


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
    """

    parameter: SharedParameter
    config: LayerConfig
    steps: tuple[int, ...]
    input_group: str | None

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
    def metric_key(self) -> MetricKey:
        """Key of a loop metric within one collection: layer, steps, prompts and draws."""
        return self.name, self.steps, self.gradients
