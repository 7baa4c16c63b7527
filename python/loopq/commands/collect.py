"""`loopq collect`: run the rollouts and store the inputs of the shared layers."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from loopq.calibrate.collect import collect_rows
from loopq.calibrate.hessian_dump import HessianDump, collect_hessians
from loopq.calibrate.prompts import CalibrationTake, calibration_tokens
from loopq.calibrate.rollouts import Collection
from loopq.calibrate.select import select
from loopq.commands import COMMANDS, Command
from loopq.commands.options import (
    add_execution,
    add_patterns,
    add_text,
    calibration_take,
    execution,
    ranks_of_environment,
    whole,
)
from loopq.commands.output import print_dump
from loopq.commands.source import add_source, load
from loopq.errors import ConfigError
from loopq.models.depths import at_depths
from loopq.quantizers.gptq_cd import MetricSettings
from loopq.run import ranks as in_ranks
from loopq.run.plan import loop_metrics
from loopq.run.ranks import Ranks
from loopq.settings.steps import parse_steps

#: Draws of labels for each prompt, as of `loopq quantize`.
_DRAWS = MetricSettings().draws


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--out", required=True, metavar="DUMP", help="new folder for the dump")
    parser.add_argument(
        "--hessian",
        action="store_true",
        help="keep exact Hessian sums instead of rows: smaller, can be merged, and enough for every method",
    )
    parser.add_argument("--steps", help="with --hessian: steps to sum, as of `loopq quantize` (default all)")
    parser.add_argument("--per-step", action="store_true", help="with --hessian: keep each step apart")
    parser.add_argument(
        "--metric",
        choices=("inputs", "loop"),
        default="inputs",
        help="with --hessian: loop keeps the gradients' sums too, so that `loopq solve` has the loop metric; such a "
        "dump cannot be merged (default %(default)s)",
    )
    parser.add_argument(
        "--metric-prompts",
        type=whole(1, 1 << 31),
        metavar="N",
        help="with --metric loop: most prompts that gradients are taken on (default: all)",
    )
    parser.add_argument(
        "--metric-draws",
        type=whole(1, 1 << 16),
        metavar="N",
        help=f"with --metric loop: draws of labels for each prompt (default {_DRAWS})",
    )
    parser.add_argument(
        "--rows-dtype",
        choices=("float32", "float16", "bfloat16"),
        help="storage of the rows (default: the model's own)",
    )
    parser.add_argument(
        "--shard-batches",
        type=whole(1, 1 << 20),
        default=8,
        metavar="N",
        help="batches of one file of rows (default %(default)s)",
    ).rare = True  # type: ignore[attr-defined]
    parser.add_argument(
        "--rank-timeout",
        type=whole(1, 1 << 20),
        default=600,
        metavar="SECONDS",
        help="seconds that the processes of torchrun wait for each other before the work begins (default %(default)s)",
    ).rare = True  # type: ignore[attr-defined]
    add_text(parser, "calibration", CalibrationTake)
    add_source(parser, several=True)
    add_patterns(
        parser,
        {
            "include": "observe these layers too; repeatable",
            "exclude": "do not observe these layers; repeatable",
        },
    )
    add_execution(parser)


def run(args: argparse.Namespace) -> int:
    """Collect and print the content of the dump."""
    ranks, shown = ranks_of_environment()
    _check(args, ranks)
    loaded, depth = at_depths(load(args), args.n_steps)
    with shown as progress:
        how = execution(args, progress=progress)
        tokens = calibration_tokens(loaded, args.calibration, calibration_take(args))
        if tokens.shortage:
            progress.note(tokens.shortage)
        selection = select(
            loaded.system,
            tokens,
            n_steps=depth,
            include=args.include,
            exclude=args.exclude,
            rounded=True,
            seed=how.seed,
        )
        if args.hessian:
            selection = selection.pooled(tokens.n_tokens)
        job = Collection(loaded.system, tokens, selection, how, loaded.side_files)
        out = Path(args.out)
        if args.hessian:
            most = max(p.invocations for p in selection.parameters)
            steps = None if args.steps is None else parse_steps(args.steps, most)
            more: dict[str, Any] = {"steps": steps, "per_step": args.per_step, "gradients": None}
            if args.metric == "loop":
                n_draws = args.metric_draws or _DRAWS
                more["gradients"] = loop_metrics(job, args.metric_prompts, n_draws, steps)
            if ranks is None:
                manifest = collect_hessians(job, out, **more)
            else:
                waiting = dataclasses.replace(ranks, timeout=float(args.rank_timeout))
                manifest = in_ranks.collect_hessians(waiting, HessianDump.of(job, out, **more))
        else:
            manifest = collect_rows(job, out, rows_dtype=args.rows_dtype, shard_batches=args.shard_batches)
    if ranks is None or ranks.rank == 0:
        print_dump(manifest)
        print(f"written to {out}")
    return 0


def _check(args: argparse.Namespace, ranks: Ranks | None) -> None:
    """Reject options that the other choices make useless."""
    if ranks is not None and not args.hessian:
        raise ConfigError(
            f"{ranks.world} processes can divide sums, not rows: add --hessian, or start one process"
        )
    if not args.hessian and (args.steps is not None or args.per_step):
        raise ConfigError(
            f"{'--per-step' if args.per_step else '--steps'} goes with --hessian: rows are kept of all steps"
        )
    if args.metric == "loop" and not args.hessian:
        raise ConfigError(
            "--metric loop goes with --hessian: the sums of gradients stand beside those of the inputs"
        )
    if args.metric != "loop" and (args.metric_prompts or args.metric_draws):
        raise ConfigError("--metric-prompts and --metric-draws go with --metric loop")
    if args.hessian and args.rows_dtype:
        raise ConfigError("--rows-dtype goes without --hessian: no rows are kept")


COMMANDS.register("collect")(
    Command(
        "run the model and save the inputs of its looped layers",
        add,
        run,
        30,
        keeps=lambda args: Path(args.out),
        together=True,
    )
)
