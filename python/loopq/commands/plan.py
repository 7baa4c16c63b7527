"""A quantization before it runs: its cost (`--dry-run`, `check --plan`), and its size and KL per grid (`--table`)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from loopq.calibrate.data import TokenSet
from loopq.calibrate.prompts import CALIBRATION_PROMPTS, Take, calibration_tokens
from loopq.commands.options import calibration_take, execution, take, whole
from loopq.commands.output import divergence
from loopq.commands.source import load, load_source
from loopq.layers.grid import BITS
from loopq.models.build import build_shape
from loopq.models.depths import Depths, at_depths
from loopq.run.config import QuantConfig
from loopq.run.forecast import Forecast, forecast
from loopq.run.model_source import ModelSource
from loopq.run.trials import divide, try_grids
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


def shape_of(args: argparse.Namespace) -> LoopedSystem:
    """Build a folder's model without its values, from config.json alone. Other models are loaded."""
    if args.model is not None and (Path(args.model) / "config.json").is_file():
        return build_shape(Path(args.model), args.system, trust_remote_code=args.trust_remote_code)
    return load(args).system


def forecasts(args: argparse.Namespace, configs: Sequence[QuantConfig], asked: Take) -> list[Forecast]:
    """Forecast the cost of quantizations of one model. Prompts count by their number and length."""
    system, n_steps = shape_of(args), args.n_steps
    if isinstance(n_steps, tuple):
        system, n_steps = Depths(system, n_steps), None
    prompts = (np.zeros(asked.seq_len, np.int64),) * (asked.n_prompts or CALIBRATION_PROMPTS)
    how = execution(args)
    return [
        forecast(system, config, TokenSet(prompts, "a text", "windows"), how, n_steps) for config in configs
    ]


def dry_run(args: argparse.Namespace, config: QuantConfig) -> int:
    """Print the cost of a quantization. The exit code is 1 if memory does not suffice."""
    (cost,) = forecasts(args, [config], calibration_take(args))
    print("\n".join(cost.lines()))
    if config.fit is not None:
        print("not counted: the trials of --fit")
    return int(cost.peak > cost.limit)


def table(args: argparse.Namespace, config: QuantConfig) -> int:
    """Print the size of the model on several grids, and their KL on calibration prompts that are held back."""
    loaded, depth = at_depths(load_source(args), args.n_steps)
    tokens = calibration_tokens(loaded, args.calibration, calibration_take(args))
    n_used, n_held = divide(tokens)
    # No random tokens are put into the held prompts.
    plain = calibration_tokens(loaded, args.calibration, take(args).changed(n_prompts=n_used + n_held))
    if isinstance(loaded.system, Discovers):
        loaded.system.look(tokens.first(execution(args).seed))
    with Line() as progress:
        how = execution(args, progress=progress)
        used = tokens.take(0, n_used)
        source = ModelSource.of(loaded.system, used, config, n_steps=depth, execution=how)
        trials = try_grids(source, config, args.table, plain.take(n_used))
    rows = []
    for trial in trials:
        layers = trial.checkpoint.layers.values()
        packed, n_weights = sum(x.n_bytes for x in layers), sum(x.codes.size for x in layers)
        interval = trial.measured.kl_interval()
        ends = None if interval is None else f"[{divergence(interval.low)}, {divergence(interval.high)}]"
        kl = divergence(float(trial.measured.kl.mean()))
        rows.append((trial.bits, f"{8 * packed / n_weights:.3f}", size(trial.checkpoint.n_bytes), kl, ends))
    hidden = trials[0].measured.output == "hidden"
    what = "squared relative error" if hidden else "estimated KL"
    print(render(("bits", "bits a weight", "whole file", what, "95 %"), rows))
    print(
        f"{what}: measured on the last {n_held} calibration prompts, with all layers solved on the other {n_used} and "
        "on inputs of full precision. On another kind of text it differs: `loopq evaluate` measures any"
    )
    return 0
