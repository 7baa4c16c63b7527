"""`loopq merge`: add Hessian dumps that were collected separately."""

from __future__ import annotations

import argparse
from pathlib import Path

from loopq.calibrate.merge import merge
from loopq.commands import COMMANDS, Command
from loopq.commands.output import print_dump
from loopq.terminal.progress import Line
from loopq.terminal.text import say


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "parts", nargs="+", metavar="DUMP", help="dumps of `loopq collect --hessian`, two or more"
    )
    parser.add_argument("--out", required=True, metavar="DUMP", help="folder for the sum")


def run(args: argparse.Namespace) -> int:
    """Merge and print the content of the sum."""
    parts, out = [Path(p) for p in args.parts], Path(args.out)
    with Line() as progress:
        merged = merge(parts, out, progress)
    print_dump(merged)
    say(f"written to {out}")
    return 0


COMMANDS.register("merge")(Command("add Hessian dumps that were collected apart", add, run, 31))
