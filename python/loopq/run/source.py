"""Source of weights, Hessians and loop metrics of a quantization: the interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loopq.calibrate.hessians import Hessians
from loopq.layers.layer import QuantizedLayer
from loopq.quantizers.task import Metrics, Task
from loopq.run.config import QuantConfig
from loopq.run.plan import Plan
from loopq.run.ranks import Ranks
from loopq.run.solver import Solver
from loopq.settings.execution import Execution
from loopq.storage.journal import Journal, fingerprint
from loopq.storage.schema import Object
from loopq.storage.weights import ModelWeights

Layers = dict[str, QuantizedLayer]
#: Layers with their Hessians and loop metrics.
Part = tuple[Sequence[Task], Hessians, Metrics]


class Source(ABC):
    """Data of a quantization, and the settings of its execution."""

    @property
    @abstractmethod
    def execution(self) -> Execution:
        """Threads, memory, progress and the work folder."""

    @property
    def device(self) -> str:
        """Device of the solvers, for methods that support it."""
        return "cpu"

    @property
    @abstractmethod
    def weights(self) -> ModelWeights:
        """Stored weights of the full-precision model."""

    @property
    @abstractmethod
    def side_files(self) -> Mapping[str, bytes]:
        """Config and tokenizer files of the model."""

    @abstractmethod
    def facts(self) -> Object:
        """Return the facts for a checkpoint: system, depth, seed and calibration set."""

    @abstractmethod
    def key(self, plan: Plan) -> str:
        """Return the identity of the work: everything that determines a result."""

    @abstractmethod
    def plan(self, config: QuantConfig) -> Plan:
        """Plan the treatment of each layer.

        Raises
        ------
        ConfigError
            As in `Plan.of`, or the source does not support the settings.
        """

    @abstractmethod
    def prepare(self, plan: Plan) -> Plan:
        """Decide what only the source can decide, report the cost, and return the plan to carry out.

        Raises
        ------
        ConfigError
            The memory limit does not allow the plan.
        """

    def divisible(self, plan: Plan, folder: Path, ranks: Ranks | None) -> Source:
        """Return a source that several processes read without running the model. A dump is one.

        Parameters
        ----------
        plan : Plan
            The plan that they divide.
        folder : Path
            Work folder of their output.
        ranks : Ranks or None
            This process among those that divide rollouts.
        """
        return self

    @abstractmethod
    def parts(self, plan: Plan, tasks: Sequence[Task]) -> Generator[Part, None, None]:
        """Divide tasks into parts and yield their Hessians and loop metrics. These are valid until the next part."""

    def journal(self, plan: Plan, name: str, *more: Any) -> Journal:
        """Return the journal for finished pieces of one kind. `more` is what else determines them."""
        folder = self.execution.folder(name)
        key = self.key(plan) if folder else ""
        return Journal(folder, fingerprint(key, *more) if folder and more else key)

    def solver(
        self, plan: Plan, hessians: Hessians, metrics: Metrics, journal: Journal | None = None
    ) -> Solver:
        """Return the solver of layers from Hessians."""
        threshold = plan.config.rank_threshold
        return Solver(
            self.weights, hessians, self.execution, threshold, metrics, journal or Journal(None), self.device
        )
