"""`loopq evaluate`: how far a checkpoint is from the full-precision model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from loopq.checkpoint.convert import format_of
from loopq.commands import COMMANDS, Command
from loopq.commands.options import add_execution, add_source, add_text, execution, load, take, whole
from loopq.commands.output import measurement_table
from loopq.progress import Line


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_source(parser)
    parser.add_argument(
        "checkpoints",
        nargs="+",
        metavar="DIR",
        help="checkpoints of that model, of any format that loopq reads",
    )
    add_text(parser, "text")
    add_execution(parser, only=("seed", "batch_size"))
    parser.add_argument(
        "--n-seeds",
        type=whole(1, 1 << 16),
        default=1,
        metavar="N",
        help="paired initial states of each prompt (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Measure and print a table."""
    from loopq.api import evaluate
    from loopq.calibrate.prompts import evaluation_tokens

    for folder in args.checkpoints:
        format_of(Path(folder))
    loaded = load(args)
    tokens = evaluation_tokens(loaded, args.text, take(args))
    how = execution(args)
    with Line() as progress:
        measured = evaluate(
            loaded,
            args.checkpoints,
            tokens,
            n_steps=args.n_steps,
            seeds=range(how.seed, how.seed + args.n_seeds),
            progress=progress,
            batch_size=how.batch_size,
        )
    summaries = [m.summary() for m in measured]
    for summary, measurement in zip(summaries[1:], measured[1:], strict=True):
        interval = measurement.kl_interval()
        summary["kl_95"] = None if interval is None else [interval.low, interval.high]
    if args.json:
        print(json.dumps(summaries, indent=1))
        return 0
    said = tokens.describe()
    depth = args.n_steps if args.n_steps is not None else loaded.system.n_steps
    print(
        f"{said['n_prompts']} prompts, {said['n_tokens']} tokens of {said['source']}, {depth} steps, initial states of "
        f"each: {args.n_seeds}, the same in every row"
    )
    print(measurement_table(summaries))
    print(
        "KL: to full precision, mean over tokens; 95 %: bootstrap over prompts; agreement: same top-1 token"
    )
    return 0


COMMANDS.register("evaluate")(Command("measure checkpoints against the full-precision model", add, run, 11))
