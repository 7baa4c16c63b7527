"""What every section of a diagnosis works on: model, prompts, settings, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from loopq.calibrate.collect import Collection, HessianSet
from loopq.calibrate.data import TokenSet
from loopq.calibrate.select import Selection, select
from loopq.diagnose.config import DiagnoseConfig
from loopq.diagnose.weights import Rounder, core_rounder
from loopq.settings.execution import Execution
from loopq.systems.base import LoopedSystem, SharedParameter


@dataclass
class Context:
    """Model, prompts and settings of one diagnosis.

    Parameters
    ----------
    system : LoopedSystem
        The model's adapter.
    tokens : TokenSet
        Prompts.
    n_steps : int
        Depth.
    config : DiagnoseConfig
        Settings.
    rounder : callable
        Takes a weight and its settings, returns the dequantized weight.
    execution : Execution
        Seed of the initial states where no others are named, prompts that run together, threads, memory for Hessians,
        folder of what is finished, progress.
    train : TokenSet, optional
        Prompts of the trained rank-4 update; those of `tokens` that no run compares weights on when absent.
    """

    system: LoopedSystem
    tokens: TokenSet
    n_steps: int
    config: DiagnoseConfig = field(default_factory=DiagnoseConfig)
    rounder: Rounder = core_rounder
    execution: Execution = field(default_factory=Execution)
    train: TokenSet | None = None

    def on(self, tokens: TokenSet) -> Self:
        """The same on other prompts."""
        return replace(self, tokens=tokens)

    def seeded(self, seed: int) -> Self:
        """The same from other initial states."""
        return replace(self, execution=self.execution.changed(seed=seed))

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
        return select(self.system, self.tokens, n_steps=self.n_steps, seed=self.execution.seed)

    @cached_property
    def job(self) -> Collection:
        """Collection of the per-step Hessians."""
        return Collection(self.system, self.tokens, self.selection, self.execution)

    @cached_property
    def prompts(self) -> TokenSet:
        """Prompts of the runs that compare weights."""
        return self.tokens.take(0, self.config.n_prompts)

    @cached_property
    def training(self) -> TokenSet | None:
        """Prompts to train on, none of which is in `prompts`; None where all are."""
        measured = self.config.n_prompts
        rest = self.tokens.take(measured) if len(self.tokens.sequences) > measured else None
        return self.train or rest

    @property
    def n_seeds(self) -> int:
        """Initial states of each prompt where several are run."""
        return len(self.config.seeds) if self.system.state_is_random else 1

    def fingerprint(self) -> str:
        """Digest of weights, prompts and depth."""
        return self.job.fingerprint("diagnosis")

    def sums(self) -> HessianSet:
        """Empty accumulators of every input group, one for each step."""
        steps = {p.name: list(range(p.invocations)) for p in self.selection.distinct_inputs}
        return HessianSet(self.job, steps, per_step=True)
