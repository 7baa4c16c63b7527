"""A quantization before it runs: its cost (`--dry-run`, `check --plan`), and its size and KL per grid (`--table`)."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loopq.calibrate.data import TokenSet
from loopq.calibrate.prompts import CALIBRATION_PROMPTS, CalibrationTake, Take, calibration_tokens
from loopq.commands.options import whole
from loopq.commands.output import divergence
from loopq.commands.source import ModelOptions
from loopq.layers.grid import BITS
from loopq.models.build import build_shape
from loopq.models.depths import Depths, at_depths
from loopq.models.load import LoadedModel
from loopq.run.config import QuantConfig
from loopq.run.forecast import Forecast, forecast
from loopq.run.model_source import ModelSource
from loopq.run.trials import Trial, divide, try_grids
from loopq.settings.execution import Execution
from loopq.systems.base import LoopedSystem
from loopq.systems.capabilities import Discovers
from loopq.terminal.progress import Line
from loopq.terminal.table import render, size


def several_bits(text: str) -> tuple[int, ...]:
    """Read the bits of the grids of a table."""
    bits = tuple(whole(min(BITS), max(BITS))(part) for part in text.split(","))
    wrong = [n for n in bits if n not in BITS]
    if wrong or len(set(bits)) < len(bits):
        allowed = ", ".join(map(str, BITS))
        raise argparse.ArgumentTypeError(f"{text!r}: give some of {allowed}, each once, joined by commas")
    return bits


@dataclass(frozen=True)
class DryRun:
    """A model without its values, if it has a folder, and how it is to be run.

    Parameters
    ----------
    system : LoopedSystem
        Its adapter.
    n_steps : int, optional
        Depth. The model's own when absent.
    execution : Execution
        Its memory limits everything, the model included.
    """

    system: LoopedSystem
    n_steps: int | None
    execution: Execution

    @classmethod
    def of(cls, source: ModelOptions, execution: Execution) -> DryRun:
        """Build a folder's model from config.json alone. Other models are loaded."""
        how = source.loading
        if source.model is not None and (Path(source.model) / "config.json").is_file():
            system = build_shape(
                Path(source.model), how["system"], trust_remote_code=how["trust_remote_code"]
            )
        else:
            system = source.load().system
        if isinstance(source.n_steps, tuple):
            return cls(Depths(system, source.n_steps), None, execution)
        return cls(system, source.n_steps, execution)

    def forecasts(self, configs: Sequence[QuantConfig], asked: Take) -> list[Forecast]:
        """Forecast the cost of quantizations. Prompts count by their number and length."""
        prompts = (np.zeros(asked.seq_len, np.int64),) * (asked.n_prompts or CALIBRATION_PROMPTS)
        tokens = TokenSet(prompts, "a text", "windows")
        return [forecast(self.system, config, tokens, self.execution, self.n_steps) for config in configs]


def dry_run(shape: DryRun, config: QuantConfig, asked: Take) -> int:
    """Print the cost of a quantization. The exit code is 1 if memory does not suffice."""
    (cost,) = shape.forecasts([config], asked)
    print("\n".join(cost.lines()))
    if config.fit is not None:
        print("not counted: the trials of --fit")
    return int(cost.peak > cost.limit)


@dataclass(frozen=True)
class GridTable:
    """A model and the grids of which `--table` prints size and KL.

    Parameters
    ----------
    loaded : LoadedModel
        The model, at depth `n_steps`.
    n_steps : int, optional
        Depth. The model's own when absent.
    tokens, plain : TokenSet
        Calibration prompts, with random tokens and without.
    config : QuantConfig
        Settings besides the bits.
    bits : tuple of int
        Bits of the grids.
    execution : Execution
        How the work is done.
    """

    loaded: LoadedModel
    n_steps: int | None
    tokens: TokenSet
    plain: TokenSet
    config: QuantConfig
    bits: tuple[int, ...]
    execution: Execution

    @classmethod
    def of(
        cls,
        source: ModelOptions,
        calibration: str | None,
        take: CalibrationTake,
        config: QuantConfig,
        bits: tuple[int, ...],
        execution: Execution,
    ) -> GridTable:
        """Load the model and its prompts."""
        loaded, depth = at_depths(source.load_source(), source.n_steps)
        tokens = calibration_tokens(loaded, calibration, take)
        # No random tokens are put into the held prompts.
        held = take.changed(n_prompts=sum(divide(tokens)), random_tokens=0.0)
        plain = calibration_tokens(loaded, calibration, held)
        return cls(loaded, depth, tokens, plain, config, bits, execution)

    def print(self) -> int:
        """Print the size of the model on each grid, and its KL on calibration prompts that are held back."""
        n_used, n_held = divide(self.tokens)
        if isinstance(self.loaded.system, Discovers):
            self.loaded.system.look(self.tokens.first(self.execution.seed))
        with Line() as progress:
            how = dataclasses.replace(self.execution, progress=progress)
            used = self.tokens.take(0, n_used)
            source = ModelSource.of(
                self.loaded.system, used, self.config, n_steps=self.n_steps, execution=how
            )
            trials = try_grids(source, self.config, self.bits, self.plain.take(n_used))
        print(_measured(trials))
        what = _what(trials)
        print(
            f"{what}: measured on the last {n_held} calibration prompts, with all layers solved on the other {n_used} "
            "and on inputs of full precision. On another kind of text it differs: `loopq evaluate` measures any"
        )
        return 0


def _what(trials: Sequence[Trial]) -> str:
    return "squared relative error" if trials[0].measured.output == "hidden" else "estimated KL"


def _measured(trials: Sequence[Trial]) -> str:
    """Return a table of the trials."""
    rows = []
    for trial in trials:
        layers = trial.checkpoint.layers.values()
        packed, n_weights = sum(x.n_bytes for x in layers), sum(x.codes.size for x in layers)
        interval = trial.measured.kl_interval()
        ends = None if interval is None else f"[{divergence(interval.low)}, {divergence(interval.high)}]"
        kl = divergence(float(trial.measured.kl.mean()))
        rows.append((trial.bits, f"{8 * packed / n_weights:.3f}", size(trial.checkpoint.n_bytes), kl, ends))
    return render(("bits", "bits a weight", "whole file", _what(trials), "95 %"), rows)
