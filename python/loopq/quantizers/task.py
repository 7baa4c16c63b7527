"""One layer of a run: its settings, its steps, and the input that it shares."""

from __future__ import annotations

from dataclasses import dataclass

from loopq.quantizers.config import LayerConfig
from loopq.quantizers.loop_metric import LoopMetric
from loopq.systems.base import SharedParameter

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
        Steps whose Hessians are summed; empty where the layer is not observed.
    input_group : str or None
        First parameter that reads the same input: the key of its Hessian. None where no activation is needed.
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
        """How the steps are weighted."""
        return self.config.calibration.step_weights

    @property
    def gradients(self) -> tuple[int | None, int] | None:
        """Most prompts (None: a share) and label draws of this layer's loop metric; None where it has none."""
        return self.config.method.gradients if self.input_group else None

    @property
    def metric_key(self) -> MetricKey:
        """What a loop metric of one collection depends on: layer, steps, prompts and draws."""
        return self.name, self.steps, self.gradients
