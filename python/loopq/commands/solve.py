"""`loopq solve`: quantize from a dump, on any box."""

from __future__ import annotations

import argparse

import loopq
from loopq.commands import COMMANDS, Command
from loopq.commands.options import add_quantizer, add_threads, quant_config, work_folder
from loopq.commands.output import print_checkpoint
from loopq.progress import Line


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("dump", metavar="DUMP", help="dump of `loopq collect` or `loopq merge`")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the checkpoint")
    add_threads(parser)
    add_quantizer(parser)


def run(args: argparse.Namespace) -> int:
    """Solve and print a table of the layers."""
    config = quant_config(args)
    with Line() as progress:
        result = loopq.solve(args.dump, config, out=args.out, threads=args.threads, progress=progress)
    print_checkpoint(result, args.out)
    return 0


COMMANDS.register("solve")(
    Command("quantize from a dump; needs no torch", add, run, 32, keeps=lambda args: work_folder(args.out))
)
