"""`loopq solve`: quantize from a dump, without torch."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

import loopq
from loopq.commands import COMMANDS, Command
from loopq.commands.options import add_execution, add_quantizer, execution, group_of, quant_config
from loopq.commands.output import print_checkpoint
from loopq.run.config import QuantConfig
from loopq.run.ranks import Ranks
from loopq.storage.lock import work_folder
from loopq.terminal.progress import Line
from loopq.terminal.text import say


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("dump", metavar="DUMP", help="dump of `loopq collect` or `loopq merge`")
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder for the checkpoint")
    several = group_of(parser, "several processes or machines").add_mutually_exclusive_group()
    several.add_argument(
        "--worker",
        action="store_true",
        help="solve layers that no other process has claimed, until all are solved; start any number of workers, "
        "on any machines that share the folders",
    )
    several.add_argument(
        "--shard",
        type=_shard,
        metavar="K/N",
        help="solve the K-th of N parts of the layers, counted from 1, without waiting for the others, for job arrays",
    )
    add_quantizer(parser, model=False)
    add_execution(parser, only=("threads",))


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}: give K/N, as in 3/20")
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class _Solve:
    """What to solve, with which settings, and how the work is divided."""

    dump: str
    out: str
    config: QuantConfig
    several: bool
    shard: tuple[int, int] | None
    threads: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> _Solve:
        """Read the options."""
        # Processes started by torchrun are workers.
        several = args.worker or Ranks.of_environment() is not None
        config = quant_config(args, model=False)
        return cls(args.dump, args.out, config, several, args.shard, execution(args).threads)


def run(args: argparse.Namespace) -> int:
    """Solve and print a table of the layers."""
    asked = _Solve.of(args)
    with Line() as progress:
        result = loopq.solve(
            asked.dump,
            asked.config,
            out=asked.out,
            several=asked.several,
            shard=asked.shard,
            threads=asked.threads,
            progress=progress,
        )
    if result is None:
        say(f"the layers of this shard are solved; the one that ends last writes {asked.out}")
    else:
        print_checkpoint(result, asked.out)
    return 0


COMMANDS.register("solve")(
    Command(
        "quantize from a dump; needs no torch",
        add,
        run,
        32,
        keeps=lambda args: work_folder(args.out),
        together=True,
    )
)
