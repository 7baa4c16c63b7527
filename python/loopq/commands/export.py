"""`loopq export`: checkpoints that other tools load."""

from __future__ import annotations

import argparse

from loopq.commands import COMMANDS, Command
from loopq.commands.options import add_format


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("folder", metavar="DIR", help="checkpoint of any format that loopq reads")
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder for the checkpoint")
    add_format(parser)
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code that came with the model, to compare logits",
    )


def run(args: argparse.Namespace) -> int:
    """Write the format, read it back, compare, and say what it cost."""
    from loopq.run.export import export

    exported = export(
        args.folder, args.out, args.format, ragged=args.ragged, trust_remote_code=args.trust_remote_code
    )
    print("\n".join(exported.lines()))
    return 0


COMMANDS.register("export")(Command("write a checkpoint in a format that other tools load", add, run, 20))
