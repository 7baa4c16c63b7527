"""`loopq collect`: run the rollouts and store the inputs of the shared layers."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopq.calibrate.collect import collect_rows
from loopq.calibrate.data import TokenSet
from loopq.calibrate.dump import Manifest
from loopq.calibrate.hessian_dump import HessianDump, collect_hessians
from loopq.calibrate.prompts import CalibrationTake, calibration_tokens
from loopq.calibrate.rollouts import Collection
from loopq.calibrate.select import select
from loopq.commands import COMMANDS, Command
from loopq.commands.options import (
    add_execution,
    add_patterns,
    add_settings,
    add_text,
    calibration_take,
    execution,
    given,
    ranks_of_environment,
    whole,
)
from loopq.commands.output import print_dump
from loopq.commands.source import ModelOptions, add_source
from loopq.errors import ConfigError
from loopq.models.depths import at_depths
from loopq.models.load import LoadedModel
from loopq.quantizers.config import LayerConfig
from loopq.quantizers.gptq_cd import MetricSettings
from loopq.run import ranks as in_ranks
from loopq.run.plan import loop_metrics
from loopq.run.ranks import Ranks
from loopq.settings.execution import Execution
from loopq.settings.steps import parse_steps
from loopq.terminal.progress import Progress
from loopq.terminal.text import say

#: Draws of labels for each prompt, as of `loopq quantize`.
_DRAWS = MetricSettings().draws
#: Settings of a layer that sums depend on.
_OF_SUMS = ("steps", "metric_prompts", "metric_draws")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--out", required=True, metavar="DUMP", help="new folder for the dump")
    parser.add_argument(
        "--hessian",
        action="store_true",
        help="keep exact Hessian sums instead of rows: smaller, can be merged, and enough for every method",
    )
    parser.add_argument("--per-step", action="store_true", help="with --hessian: keep each step apart")
    parser.add_argument(
        "--metric",
        choices=("inputs", "loop"),
        default="inputs",
        help="with --hessian: loop keeps the gradients' sums too, so that `loopq solve` has the loop metric; such a "
        "dump cannot be merged (default %(default)s)",
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
    add_settings(parser, LayerConfig, only=_OF_SUMS, own=())
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


@dataclass(frozen=True)
class _SumsKept:
    """What `--hessian` keeps."""

    steps: str | None
    per_step: bool
    gradients: bool
    n_prompts: int | None
    n_draws: int
    rank_timeout: float

    def options(self, job: Collection) -> dict[str, Any]:
        """Return them as options of `collect_hessians`."""
        most = max(p.invocations for p in job.selection.parameters)
        steps = None if self.steps is None else parse_steps(self.steps, most)
        metric = loop_metrics(job, self.n_prompts, self.n_draws, steps) if self.gradients else None
        return {"steps": steps, "per_step": self.per_step, "gradients": metric}


@dataclass(frozen=True)
class _Collect:
    """A checked command with its model and prompts. It keeps rows if `sums` is None."""

    out: Path
    loaded: LoadedModel
    n_steps: int | None
    tokens: TokenSet
    include: Sequence[str]
    exclude: Sequence[str]
    sums: _SumsKept | None
    rows_dtype: str | None
    shard_batches: int
    execution: Execution

    @classmethod
    def of(cls, args: argparse.Namespace, ranks: Ranks | None, progress: Progress) -> _Collect:
        """Check the options and load."""
        _check(args, ranks)
        settings = given(args, LayerConfig)
        source = ModelOptions.of(args)
        loaded, depth = at_depths(source.load(), source.n_steps)
        tokens = calibration_tokens(loaded, args.calibration, calibration_take(args))
        sums = _SumsKept(
            settings.get("steps"),
            args.per_step,
            args.metric == "loop",
            settings.get("metric_prompts"),
            settings.get("metric_draws", _DRAWS),
            float(args.rank_timeout),
        )
        return cls(
            Path(args.out),
            loaded,
            depth,
            tokens,
            args.include,
            args.exclude,
            sums if args.hessian else None,
            args.rows_dtype,
            args.shard_batches,
            execution(args, progress=progress),
        )

    def collect(self, ranks: Ranks | None) -> Manifest:
        """Write the dump, or this process's part of it."""
        if self.tokens.shortage:
            self.execution.progress.note(self.tokens.shortage)
        selection = select(
            self.loaded.system,
            self.tokens,
            n_steps=self.n_steps,
            include=self.include,
            exclude=self.exclude,
            rounded=True,
            seed=self.execution.seed,
        )
        if self.sums is not None:
            selection = selection.pooled(self.tokens.n_tokens)
        job = Collection(self.loaded.system, self.tokens, selection, self.execution, self.loaded.side_files)
        if self.sums is None:
            return collect_rows(job, self.out, rows_dtype=self.rows_dtype, shard_batches=self.shard_batches)
        options = self.sums.options(job)
        if ranks is None:
            return collect_hessians(job, self.out, **options)
        waiting = dataclasses.replace(ranks, timeout=self.sums.rank_timeout)
        return in_ranks.collect_hessians(waiting, HessianDump.of(job, self.out, **options))


def run(args: argparse.Namespace) -> int:
    """Collect and print the content of the dump."""
    ranks, shown = ranks_of_environment()
    with shown as progress:
        job = _Collect.of(args, ranks, progress)
        manifest = job.collect(ranks)
    if ranks is None or ranks.rank == 0:
        print_dump(manifest)
        say(f"written to {job.out}")
    return 0


def _check(args: argparse.Namespace, ranks: Ranks | None) -> None:
    """Reject options that the other choices make useless."""
    settings = given(args, LayerConfig)
    if ranks is not None and not args.hessian:
        raise ConfigError(
            f"{ranks.world} processes can divide sums, not rows: add --hessian, or start one process"
        )
    if not args.hessian and ("steps" in settings or args.per_step):
        raise ConfigError(
            f"{'--per-step' if args.per_step else '--set steps'} goes with --hessian: rows are kept of all steps"
        )
    if args.metric == "loop" and not args.hessian:
        raise ConfigError(
            "--metric loop goes with --hessian: the sums of gradients stand beside those of the inputs"
        )
    if args.metric != "loop" and ("metric_prompts" in settings or "metric_draws" in settings):
        raise ConfigError("--set metric_prompts and --set metric_draws go with --metric loop")
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
