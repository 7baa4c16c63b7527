"""`loopq solve`: quantize from a dump, without torch."""

from __future__ import annotations

import argparse

import loopq
from loopq.commands import COMMANDS, Command
from loopq.commands.options import add_execution, add_quantizer, execution, quant_config
from loopq.commands.output import print_checkpoint
from loopq.progress import Line
from loopq.run.result import work_folder


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("dump", metavar="DUMP", help="dump of `loopq collect` or `loopq merge`")
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder for the checkpoint")
    add_quantizer(parser, model=False)
    add_execution(parser, only=("threads",))


def run(args: argparse.Namespace) -> int:
    """Solve and print a table of the layers."""
    config = quant_config(args)
    with Line() as progress:
        result = loopq.solve(
            args.dump, config, out=args.out, threads=execution(args).threads, progress=progress
        )
    print_checkpoint(result, args.out)
    return 0


COMMANDS.register("solve")(
    Command("quantize from a dump; needs no torch", add, run, 32, keeps=lambda args: work_folder(args.out))
)
