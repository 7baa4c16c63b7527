"""`loopq evaluate`: how far a checkpoint is from the full-precision model."""

from __future__ import annotations

import argparse
import json

from loopq import config as defaults
from loopq.commands import COMMANDS, Command
from loopq.commands.options import add_model, add_text, load
from loopq.commands.output import measurement_table
from loopq.progress import Line


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model(parser)
    parser.add_argument("checkpoints", nargs="+", metavar="DIR")
    add_text(parser, "text", defaults.EVALUATION_PROMPTS)
    parser.add_argument(
        "--n-seeds", type=int, default=1, help="paired initial states of each prompt (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Measure and print a table."""
    from loopq.api import evaluate

    loaded = load(args)
    with Line() as progress:
        measured = evaluate(
            loaded,
            args.checkpoints,
            args.text,
            n_steps=args.n_steps,
            n_prompts=args.n_prompts,
            seq_len=args.seq_len,
            batch_size=args.batch_size,
            seeds=range(args.seed, args.seed + args.n_seeds),
            progress=progress,
        )
    summaries = [m.summary() for m in measured]
    print(json.dumps(summaries, indent=1) if args.json else measurement_table(summaries))
    return 0


COMMANDS.register("evaluate")(Command("measure checkpoints against the full-precision model", add, run, 11))
