"""`loopq solve`: quantize from a dump, on any box."""

from __future__ import annotations

import argparse

import loopq
from loopq.commands import COMMANDS, Command
from loopq.commands.options import add_quantizer, quant_config
from loopq.commands.output import print_checkpoint
from loopq.progress import Line


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("dump", metavar="DUMP")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the checkpoint")
    parser.add_argument(
        "--threads", type=int, default=0, help="threads; 0 takes all cores; changes no result"
    )
    add_quantizer(parser)


def run(args: argparse.Namespace) -> int:
    """Solve and print a table of the layers."""
    with Line() as progress:
        result = loopq.solve(
            args.dump, quant_config(args), out=args.out, threads=args.threads, progress=progress
        )
    print_checkpoint(result, args.out)
    return 0


COMMANDS.register("solve")(Command("quantize from a dump; needs no torch", add, run, 32))
