"""`loopq check`: does loopq's adapter fit this checkpoint?"""

from __future__ import annotations

import argparse
import dataclasses
import json

from loopq.commands import COMMANDS, Command
from loopq.commands.options import add_execution, add_source, execution, load
from loopq.terminal.table import render


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_source(parser)
    add_execution(parser, only=("seed",))
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the checks; the exit code is 1 where one fails."""
    from loopq.models.check import check_model

    loaded = load(args)
    if not args.json:
        print("\n".join(loaded.report.lines()))
    report = check_model(loaded, n_steps=args.n_steps, seed=execution(args).seed)
    if args.json:
        found = {"load": dataclasses.asdict(loaded.report), "ok": report.ok, **dataclasses.asdict(report)}
        print(json.dumps(found, indent=1))
        return int(not report.ok)
    words = {True: "holds", False: "FAILS", None: "does not apply"}
    print(f"system {report.system}, {report.n_steps} steps")
    print(render(("check", "verdict", "detail"), [(v.check, words[v.ok], v.detail) for v in report.verdicts]))
    for note in report.notes:
        print(f"note: {note}")
    failed = [v.check for v in report.verdicts if v.ok is False]
    print(f"loopq does not fit this model: {', '.join(failed)}" if failed else "loopq fits this model")
    return int(not report.ok)


COMMANDS.register("check")(Command("check that loopq fits a checkpoint", add, run, 41))
