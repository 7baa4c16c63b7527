"""Sources of the layers' calibration inputs."""

from __future__ import annotations

from typing import ClassVar

from loopq.settings.declare import Chosen


class Inputs(Chosen):
    """A way to calibrate, with its settings. `loopq.run.solving.solve` carries it out.

    Attributes
    ----------
    runs_between : bool
        Whether the model runs again, or in another way, after the Hessians of the full-precision rollout are collected.
        Such inputs need the model.
    takes_gradients : bool
        Whether layers may have a loop metric.
    pairs : bool
        Whether a layer's inputs of two rollouts are held together. This is done for one input of the model at a time.
    """

    runs_between: ClassVar[bool] = True
    takes_gradients: ClassVar[bool] = True
    pairs: ClassVar[bool] = False

    def n_runs(self, n_passes: int, n_inputs: int) -> int:
        """Runs over the calibration set, given the passes required by memory and the number of distinct inputs."""
        return max(1, n_passes)
