"""`loopq collect`: run the rollouts and keep what the shared layers see."""

from __future__ import annotations

import argparse
from pathlib import Path

from loopq.commands import COMMANDS, Command
from loopq.commands.options import add_execution, add_source, add_text, execution, load, take
from loopq.commands.output import print_dump
from loopq.progress import Line


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_source(parser)
    parser.add_argument("--out", required=True, metavar="DUMP", help="folder for the dump")
    add_text(parser, "calibration")
    add_execution(parser)
    parser.add_argument(
        "--include", action="append", default=[], metavar="PATTERN", help="observe these layers too"
    )
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="do not observe these layers"
    )
    parser.add_argument(
        "--hessian",
        action="store_true",
        help="keep exact Hessian sums instead of rows: smaller, can be merged, and enough for every method",
    )
    parser.add_argument("--steps", default="all", help="with --hessian: steps to sum (default %(default)s)")
    parser.add_argument("--per-step", action="store_true", help="with --hessian: keep each step apart")
    parser.add_argument(
        "--rows-dtype",
        choices=("float32", "float16", "bfloat16"),
        help="storage of the rows (default: the model's own)",
    )
    parser.add_argument(
        "--shard-batches", type=int, default=8, metavar="N", help="batches of one file (default %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Collect and print what the dump holds."""
    from loopq.calibrate.collect import Collection, collect_hessians, collect_rows
    from loopq.calibrate.prompts import calibration_tokens
    from loopq.calibrate.select import select
    from loopq.run.engine import side_files
    from loopq.steps import parse_steps

    loaded = load(args)
    with Line() as progress:
        how = execution(args, progress=progress)
        tokens = calibration_tokens(loaded, args.calibration, take(args))
        selection = select(
            loaded.system,
            tokens,
            n_steps=args.n_steps,
            include=args.include,
            exclude=args.exclude,
            seed=how.seed,
        )
        job = Collection(loaded.system, tokens, selection, how, side_files(loaded))
        out = Path(args.out)
        if args.hessian:
            steps = parse_steps(args.steps, selection.n_steps)
            manifest = collect_hessians(job, out, steps=steps, per_step=args.per_step)
        else:
            manifest = collect_rows(job, out, rows_dtype=args.rows_dtype, shard_batches=args.shard_batches)
    print_dump(manifest)
    print(f"written to {out}")
    return 0


COMMANDS.register("collect")(
    Command(
        "run the rollouts and keep what the shared layers see",
        add,
        run,
        30,
        keeps=lambda args: Path(args.out),
    )
)
