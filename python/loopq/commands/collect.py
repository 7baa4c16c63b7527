"""`loopq collect`: run the rollouts and keep what the shared layers see."""

from __future__ import annotations

import argparse
from pathlib import Path

from loopq import config as defaults
from loopq.commands import COMMANDS, Command
from loopq.commands.options import add_model, add_text, load, memory
from loopq.commands.output import print_dump
from loopq.progress import Line


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model(parser)
    parser.add_argument("--out", required=True, metavar="DUMP", help="folder for the dump")
    add_text(parser, "calibration", defaults.CALIBRATION_PROMPTS)
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
        "--memory", type=memory, metavar="SIZE", help="with --hessian: limit for accumulators, as in 8G"
    )
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
    from loopq.api import calibration_tokens
    from loopq.calibrate.collect import Collection, collect_hessians, collect_rows
    from loopq.calibrate.select import select
    from loopq.config import parse_steps
    from loopq.jobs.run import side_files

    loaded = load(args)
    tokens = calibration_tokens(loaded, args.calibration, n_prompts=args.n_prompts, seq_len=args.seq_len)
    selection = select(
        loaded.system,
        tokens,
        n_steps=args.n_steps,
        include=args.include,
        exclude=args.exclude,
        seed=args.seed,
    )
    job = Collection(loaded.system, tokens, selection, args.batch_size, args.seed, side_files(loaded))
    out = Path(args.out)
    with Line() as progress:
        if args.hessian:
            manifest = collect_hessians(
                job,
                out,
                steps=parse_steps(args.steps, selection.n_steps),
                per_step=args.per_step,
                memory=args.memory,
                threads=args.threads,
                progress=progress,
            )
        else:
            manifest = collect_rows(
                job, out, rows_dtype=args.rows_dtype, shard_batches=args.shard_batches, progress=progress
            )
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
