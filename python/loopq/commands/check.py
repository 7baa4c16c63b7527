"""`loopq check`: test whether loopq's adapter fits a checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from loopq.calibrate.prompts import Take
from loopq.commands import COMMANDS, Command
from loopq.commands.options import add_execution, execution
from loopq.commands.plan import forecasts
from loopq.commands.source import add_source, load
from loopq.errors import ConfigError
from loopq.models.check import check_model
from loopq.run.config import QuantConfig
from loopq.run.estimate import duration
from loopq.terminal.table import render


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_source(parser)
    add_execution(parser, only=("seed", "memory", "threads", "batch_size"))
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print memory and time of a quantization with the default settings, from config.json alone; --memory then "
        "limits everything, the model included (default: the free memory)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the checks. The exit code is 1 if one fails."""
    if args.plan:
        return _plan(args)
    loaded = load(args)
    if not args.json:
        print("\n".join(loaded.report.lines()))
    report = check_model(loaded, n_steps=args.n_steps, seed=execution(args).seed)
    if args.json:
        data = {"load": dataclasses.asdict(loaded.report), "ok": report.ok, **dataclasses.asdict(report)}
        print(json.dumps(data, indent=1))
        return int(not report.ok)
    words = {True: "holds", False: "FAILS", None: "does not apply"}
    print(f"system {report.system}, {report.n_steps} steps")
    print(render(("check", "verdict", "detail"), [(v.check, words[v.ok], v.detail) for v in report.verdicts]))
    for note in report.notes:
        print(f"note: {note}")
    failed = [v.check for v in report.verdicts if v.ok is False]
    print(f"loopq does not fit this model: {', '.join(failed)}" if failed else "loopq fits this model")
    return int(not report.ok)


def _plan(args: argparse.Namespace) -> int:
    """Print the cost of a quantization of 128 prompts of 128 tokens without reading the model's weights."""
    if args.model is None or not (Path(args.model) / "config.json").is_file():
        raise ConfigError("--plan: name a folder with the model's config.json; its weights need not be there")
    cost, fast = forecasts(args, [QuantConfig(), QuantConfig().preset("fast")], Take())
    print("\n".join(cost.lines()))
    seconds = duration(sum(fast.seconds.values()))
    print(f"with --preset fast, without loop metrics: {fast.n_passes} passes, {seconds}")
    return int(cost.peak > cost.limit)


COMMANDS.register("check")(Command("check that loopq fits a checkpoint", add, run, 41))
