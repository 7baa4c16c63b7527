"""Shared input of all sections of a diagnosis: model, prompts, settings and derived data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.weights import Rounder, core_rounder
from loopq.calibrate.data import TokenSet
from loopq.calibrate.hessian_set import HessianSet
from loopq.calibrate.rollouts import Collection
from loopq.calibrate.select import Selection, select
from loopq.layers.shared import SharedParameter
from loopq.settings.execution import Execution
from loopq.systems.base import LoopedSystem


@dataclass
class Context:
    """Model, prompts and settings of one diagnosis.

    Parameters
    ----------
    tokens : TokenSet
        Prompts.
    config : DiagnoseConfig
        Settings.
    rounder : callable
        Takes a weight and its settings, returns the dequantized weight.
    execution : Execution
        Default seed of the initial states, batch size, threads, memory for Hessians, work folder and progress.
    train : TokenSet, optional
        Prompts of the trained rank-4 update. By default, those of `tokens` that no comparison of weights uses.
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
        """Layers with observed inputs, and the layers that share an input."""
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
        """Training prompts disjoint from `prompts`. None where `prompts` holds all."""
        measured = self.config.n_prompts
        rest = self.tokens.take(measured) if len(self.tokens.sequences) > measured else None
        return self.train or rest

    @property
    def n_seeds(self) -> int:
        """Number of initial states per prompt in runs that use several."""
        return len(self.config.seeds) if self.system.state_is_random else 1

    def fingerprint(self) -> str:
        """Digest of weights, prompts and depth."""
        return self.job.key("diagnosis")

    def sums(self) -> HessianSet:
        """Empty accumulators, one per input group and step."""
        steps = {p.name: list(range(p.invocations)) for p in self.selection.distinct_inputs}
        return HessianSet(self.job, steps, per_step=True)
