"""`loopq check`: does loopq's adapter fit this checkpoint?"""

from __future__ import annotations

import argparse

from loopq.commands import COMMANDS, Command
from loopq.commands.options import add_model, load
from loopq.table import render


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    """Run the checks; the exit code is 1 where one fails."""
    from loopq.systems.check import check_model

    loaded = load(args)
    print("\n".join(loaded.report.lines()))
    report = check_model(loaded, n_steps=args.n_steps, seed=args.seed)
    words = {True: "holds", False: "FAILS", None: "does not apply"}
    print(render(("check", "verdict", "detail"), [(v.check, words[v.ok], v.detail) for v in report.verdicts]))
    for note in report.notes:
        print(f"note: {note}")
    return int(any(v.ok is False for v in report.verdicts))


COMMANDS.register("check")(Command("check that loopq fits a checkpoint", add, run, 41))
