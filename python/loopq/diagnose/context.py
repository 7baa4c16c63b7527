"""What every section of a diagnosis works on: model, prompts, settings, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from loopq.calibrate.collect import Collection, HessianSet
from loopq.calibrate.data import TokenSet
from loopq.calibrate.select import Selection, select
from loopq.diagnose.config import DiagnoseConfig
from loopq.diagnose.weights import Rounder
from loopq.settings.execution import Execution
from loopq.systems.base import LoopedSystem, SharedParameter
from loopq.terminal.progress import Progress


@dataclass
class Context:
    """Model, prompts and settings of one diagnosis.

    Parameters
    ----------
    system : LoopedSystem
        The model's adapter.
    tokens : TokenSet
        All prompts.
    n_steps : int
        Depth.
    config : DiagnoseConfig
        Settings.
    rounder : callable
        Takes a weight and its settings, returns the dequantized weight.
    progress : Progress
        Notified of the work.
    train : TokenSet, optional
        Prompts of the trained rank-4 update.
    memory : int, optional
        Limit in bytes for Hessian accumulators.
    threads : int
        Threads of the core; 0 takes all cores.
    """

    system: LoopedSystem
    tokens: TokenSet
    n_steps: int
    config: DiagnoseConfig
    rounder: Rounder
    progress: Progress
    train: TokenSet | None = None
    memory: int | None = None
    threads: int = 0

    @cached_property
    def parameters(self) -> tuple[SharedParameter, ...]:
        """Shared parameters at this depth."""
        return self.system.shared_parameters(self.n_steps)

    @cached_property
    def exposed(self) -> list[SharedParameter]:
        """Feedback-exposed layers."""
        return [p for p in self.parameters if p.exposed]

    @cached_property
    def selection(self) -> Selection:
        """Layers whose inputs are observed, and which of them read the same input."""
        return select(self.system, self.tokens, n_steps=self.n_steps, seed=self.config.seed)

    @cached_property
    def job(self) -> Collection:
        """Collection of the per-step Hessians."""
        execution = Execution(
            seed=self.config.seed,
            batch_size=self.config.batch_size,
            threads=self.threads,
            memory=self.memory,
            progress=self.progress,
        )
        return Collection(self.system, self.tokens, self.selection, execution)

    @cached_property
    def prompts(self) -> TokenSet:
        """Prompts of the runs that compare weights."""
        return self.tokens.take(0, self.config.n_prompts)

    @property
    def n_seeds(self) -> int:
        """Initial states of each prompt where several are run."""
        return len(self.config.seeds) if self.system.state_is_random else 1

    def fingerprint(self) -> str:
        """Digest of weights, prompts and depth."""
        return self.job.fingerprint("diagnosis")

    def shared(self) -> dict[str, Any]:
        """Keyword arguments that the studies have in common."""
        return {
            "rounder": self.rounder,
            "batch_size": self.config.batch_size,
            "progress": self.progress,
        }

    def sums(self) -> HessianSet:
        """Empty accumulators of every input group, one for each step."""
        steps = {p.name: list(range(p.invocations)) for p in self.selection.distinct_inputs}
        return HessianSet(self.job, steps, per_step=True)
