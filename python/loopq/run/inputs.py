"""Where the inputs that layers are calibrated on come from."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from loopq.settings.declare import Chosen

if TYPE_CHECKING:
    from loopq.layers.layer import QuantizedLayer
    from loopq.run.engine import Run


class Inputs(Chosen):
    """A way to calibrate, with its settings."""

    @abstractmethod
    def solve(self, run: Run) -> dict[str, QuantizedLayer]:
        """Collect and solve all layers of a run."""

    def n_runs(self, n_passes: int, n_inputs: int) -> int:
        """Times the calibration set is run, by the passes that memory asks for and the number of distinct inputs."""
        return max(1, n_passes)
