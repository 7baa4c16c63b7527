"""`loopq check`: the looped systems, and whether loopq's adapter fits a checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from loopq.calibrate.prompts import Take
from loopq.commands import COMMANDS, Command
from loopq.commands.needs import needs, systems
from loopq.commands.options import add_execution, execution
from loopq.commands.plan import estimates
from loopq.commands.source import ModelOptions, add_source
from loopq.errors import ConfigError
from loopq.models.check import check_model
from loopq.models.load import LoadedModel
from loopq.run.config import QuantConfig
from loopq.settings.execution import Execution
from loopq.terminal.table import render
from loopq.terminal.text import one_a_line, say, visible


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_source(
        parser,
        "embedded model (huginn_small), folder, hub id or published model; without it, list the systems",
    )
    add_execution(parser, only=("seed", "memory", "threads", "batch_size"))
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print memory and time of a quantization with the default settings, from config.json alone; --memory then "
        "limits everything, the model included (default: the free memory)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """List the systems, or say what a model needs and run the checks. The exit code is 1 if one fails."""
    if args.plan:
        if args.model is None or not (Path(args.model) / "config.json").is_file():
            raise ConfigError(
                "--plan: name a folder with the model's config.json; its weights need not be there"
            )
        return _plan(ModelOptions.of(args), execution(args))
    if args.model is None and args.python is None:
        return _list(as_json=args.json)
    lines = [] if args.model is None else needs(args.model)
    # A name of the table is not the place of a model.
    named = bool(lines) and "/" not in args.model and not Path(args.model).exists()
    if args.json and named:
        say(json.dumps(dict(lines), indent=1))
    elif lines and not args.json:
        width = max(len(subject) for subject, _ in lines)
        say(one_a_line(f"{subject:{width}}  {text}" for subject, text in lines))
    if named:
        say("to check it, name its folder or its hub id", file=sys.stderr)
        return 0
    return _Check.of(args).check()


@dataclass(frozen=True)
class _Check:
    """A model to check, at one depth and with one seed."""

    loaded: LoadedModel
    n_steps: int | None
    seed: int
    as_json: bool

    @classmethod
    def of(cls, args: argparse.Namespace) -> _Check:
        """Read the options and load the model."""
        source = ModelOptions.of(args)
        return cls(source.load(), source.depth, execution(args).seed, args.json)

    def check(self) -> int:
        """Print the verdicts."""
        loaded = self.loaded
        if not self.as_json:
            say(one_a_line(loaded.report.lines()))
        report = check_model(loaded, n_steps=self.n_steps, seed=self.seed)
        if self.as_json:
            data = {"load": dataclasses.asdict(loaded.report), "ok": report.ok, **dataclasses.asdict(report)}
            say(json.dumps(data, indent=1))
            return int(not report.ok)
        words = {True: "holds", False: "FAILS", None: "does not apply"}
        say(f"system {report.system}, {report.n_steps} steps")
        say(
            render(
                ("check", "verdict", "detail"), [(v.check, words[v.ok], v.detail) for v in report.verdicts]
            )
        )
        for note in report.notes:
            say(visible(f"note: {note}", one_line=True))
        failed = [v.check for v in report.verdicts if v.ok is False]
        say(f"loopq does not fit this model: {', '.join(failed)}" if failed else "loopq fits this model")
        return int(not report.ok)


def _list(*, as_json: bool) -> int:
    """Print the systems."""
    rows = systems()
    say(
        json.dumps(rows, indent=1)
        if as_json
        else render(tuple(rows[0]), [tuple(row.values()) for row in rows])
    )
    return 0


def _plan(asked: ModelOptions, how: Execution) -> int:
    """Print the cost of a quantization of 128 prompts of 128 tokens without reading the model's weights."""
    cost, fast = estimates(asked, how, [QuantConfig(), QuantConfig().preset("fast")], Take())
    say("\n".join(cost.lines()))
    say(f"with --preset fast, without loop metrics: {fast.n_passes} passes, {fast.time}")
    return int(not cost.fits)


COMMANDS.register("check")(Command("list the looped systems, or check that loopq fits a model", add, run, 41))
