"""A quantization before it runs: its cost (`--dry-run`, `check --plan`), and its size and KL per grid (`--table`)."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loopq.calibrate.data import TokenSet
from loopq.calibrate.prompts import CALIBRATION_PROMPTS, CalibrationTake, Take, calibration_tokens
from loopq.commands.options import whole
from loopq.commands.output import divergence
from loopq.commands.source import ModelOptions
from loopq.errors import ConfigError
from loopq.layers.grid import BITS
from loopq.models.build import build_shape
from loopq.models.depths import Depths, at_depths
from loopq.models.load import LoadedModel
from loopq.run.auto import choose_metric
from loopq.run.config import QuantConfig
from loopq.run.estimate import DISK, Estimate
from loopq.run.memory import weight_bytes
from loopq.run.model_source import ModelSource
from loopq.run.trials import Trial, divide, try_grids
from loopq.settings.execution import PLANNED, Execution, available_bytes
from loopq.storage.model_files import set_source
from loopq.systems.capabilities import Discovers
from loopq.terminal.progress import Line
from loopq.terminal.table import render, size
from loopq.terminal.text import say

#: Bytes of the largest model that is built to time it.
TIMED = 1 << 30


def several_bits(text: str) -> tuple[int, ...]:
    """Read the bits of the grids of a table."""
    bits = tuple(whole(min(BITS), max(BITS))(part) for part in text.split(","))
    wrong = [n for n in bits if n not in BITS]
    if wrong or len(set(bits)) < len(bits):
        allowed = ", ".join(map(str, BITS))
        raise argparse.ArgumentTypeError(f"{text!r}: give some of {allowed}, each once, joined by commas")
    return bits


def estimates(
    asked: ModelOptions, execution: Execution, configs: Sequence[QuantConfig], take: Take
) -> list[Estimate]:
    """Estimate the cost of quantizations. Prompts count by their number and length.

    A folder's model is built from config.json alone, with drawn values if it is small. Other models are loaded. The
    memory limit includes the model.

    Raises
    ------
    ConfigError
        Weights, or one layer's Hessian and solve beside them, exceed the limit.
    """
    free = available_bytes()
    limit = execution.memory or (1 << 62 if free is None else int(PLANNED * free))
    if asked.model is not None and (Path(asked.model) / "config.json").is_file():
        known, trusted = asked.loading["system"], asked.loading["trust_remote_code"]
        build = functools.partial(build_shape, Path(asked.model), known, trusted)
        system = build()
        weights, _ = weight_bytes(system.model)
        if weights <= min(TIMED, limit):
            system = build(device="cpu")
        elif weights > limit:
            set_source(system.model, {})
    else:
        system = asked.load().system
    _, held = weight_bytes(system.model)
    if held >= limit:
        raise ConfigError(
            f"weights take {size(held)} at once, above the limit of {size(limit)}: raise --memory"
        )
    how = dataclasses.replace(execution, memory=limit - held)
    prompts = (np.zeros(take.seq_len, np.int64),) * (take.n_prompts or CALIBRATION_PROMPTS)
    tokens, n_steps = TokenSet(prompts, "a text", "windows"), asked.n_steps
    if isinstance(n_steps, tuple):
        system, n_steps = Depths(system, n_steps), None
    shape = any(p.is_meta for p in system.model.parameters())
    make = ModelSource.of_shape if shape else ModelSource.of
    # The process has imported the libraries, and loaded or built the model.
    start, costs = time.process_time() + shape * held / DISK, []
    for config in configs:
        source = make(system, tokens, config, n_steps=n_steps, execution=how)
        plan = source.plan(config.with_metric("loop") if shape else config)
        cost = source.estimate(plan if shape else choose_metric(plan, source.job))
        costs.append(dataclasses.replace(cost, seconds={"start": start, **cost.seconds}))
    return costs


def dry_run(asked: ModelOptions, execution: Execution, config: QuantConfig, take: Take) -> int:
    """Print the cost of a quantization. The exit code is 1 if memory does not suffice."""
    (cost,) = estimates(asked, execution, [config], take)
    say("\n".join(cost.lines()))
    return int(not cost.fits)


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
        loaded, depth = at_depths(source.load(), source.n_steps)
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
        say(_measured(trials))
        what = _what(trials)
        say(
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
