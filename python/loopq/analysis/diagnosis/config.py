"""Settings of a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass

from loopq.errors import ConfigError
from loopq.layers.grid import PER_CHANNEL, Bits
from loopq.quantizers.config import LayerConfig
from loopq.settings.declare import Settings, setting


@dataclass(frozen=True)
class DiagnoseConfig(Settings):
    """Settings of a diagnosis.

    The numbers of prompts are small, so that a survey takes minutes.

    Parameters
    ----------
    bits : int
        Width of the rounding whose damage is measured.
    group_size : int
        Group size of the ablation and of the variants in groups; those with one scale per row are run beside them.
    damping : float
        Damping of the solver, for the directions it feels.
    n_prompts : int
        Prompts of injection, feedback, group sizes, displacement and perturbations.
    n_ablation_prompts : int
        Prompts of the single-layer ablation.
    n_jacobian_prompts : int
        Prompts of spectral radius and identity bypass.
    seeds : tuple of int
        Initial states of the feedback intervention and the bypass, where the state is drawn.
    lambdas : tuple of float
        Feedback strengths.
    radii : tuple of float
        Perturbation sizes of the bypass control, relative to the state.
    n_directions : int
        Directions of the bypass control.
    group_sizes : tuple of int
        Group-size sweep; -1 is per channel.
    n_updates : int
        Optimiser steps of the trained rank-4 update.
    """

    bits: Bits = setting(4, common=True)
    group_size: int = setting(128, common=True)
    damping: float = setting(0.01, at_least=0.0, option=False)
    n_prompts: int = setting(8, at_least=1, option=False)
    n_ablation_prompts: int = setting(10, at_least=1)
    n_jacobian_prompts: int = setting(3, at_least=1)
    seeds: tuple[int, ...] = setting((0, 1, 2), at_least=0)
    lambdas: tuple[float, ...] = setting((0.0, 0.25, 0.5, 0.75, 1.0))
    radii: tuple[float, ...] = setting((0.005, 0.01, 0.02))
    n_directions: int = setting(32, at_least=1, at_most=1 << 20)
    group_sizes: tuple[int, ...] = setting((32, 64, 128, 256, PER_CHANNEL))
    n_updates: int = setting(50, at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.seeds:
            raise ConfigError("seeds must name at least one initial state")
        self.layer(self.group_size)
        for size in self.group_sizes:
            if size != PER_CHANNEL and size < 1:
                raise ConfigError(f"group_sizes must be -1 (per channel) or at least 1; got {size}")

    def layer(self, group_size: int) -> LayerConfig:
        """Rounding of this diagnosis at a group size."""
        return LayerConfig.of(method="rtn", scale_search="max", bits=self.bits, group_size=group_size)
