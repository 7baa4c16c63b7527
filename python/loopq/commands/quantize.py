"""`loopq quantize`: the main job."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import loopq
from loopq.calibrate.data import TokenSet
from loopq.calibrate.prompts import CalibrationTake, calibration_tokens, evaluation_tokens
from loopq.commands import COMMANDS, Command, hooks
from loopq.commands.evaluate import measure, print_measured
from loopq.commands.hooks import Finished, HeldOut, Quantized
from loopq.commands.options import (
    add_execution,
    add_format,
    add_gate,
    add_quantizer,
    add_text,
    adopt_like,
    calibration_take,
    each_depth,
    execution,
    format_options,
    gate_options,
    given,
    quant_config,
    ranks_of_environment,
    take,
)
from loopq.commands.output import print_checkpoint, whole
from loopq.commands.plan import GridTable, dry_run, several_bits
from loopq.commands.source import add_source, load_source, source_words
from loopq.errors import LoopqError
from loopq.formats.base import Format, FormatOptions
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.convert import read_any
from loopq.formats.native import NATIVE
from loopq.models.load import LoadedModel
from loopq.quantizers.config import LayerConfig
from loopq.run.config import QuantConfig
from loopq.run.export import Exported, exported, quantized_format, refuse_early
from loopq.run.gate import Gate, Proof
from loopq.run.ranks import Ranks
from loopq.settings.execution import Execution
from loopq.storage.lock import check_out, kept, work_folder
from loopq.terminal.progress import Progress

_HINT = "hint: --preset best is more accurate at the same bytes, and slower"
_EXAMPLES = """examples:
  loopq quantize MODEL --out DIR                   INT4, groups of 128
  loopq quantize MODEL --out DIR --preset best     more accurate, slower
  loopq quantize MODEL --out DIR --bits 3 --group-size 32 --calibration text.txt
  loopq quantize MODEL --out DIR --fit 12GB        grids that fit a size
  loopq quantize MODEL --dry-run                   memory and time of the same
  loopq quantize MODEL --table 2,3,4               size and estimated KL of three grids
`loopq evaluate MODEL DIR` says how far the result is from the original;
docs/comparison.md has measured comparisons"""


_RARE = (
    ("like", "DIR", "take the settings of that checkpoint, its depth and its seed; options change them"),
    (
        "evaluate",
        "FILE",
        "measure the result on this held-out text (-: the one that ships with loopq) and write a model card",
    ),
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    result = parser.add_mutually_exclusive_group(required=True)
    result.add_argument("--out", metavar="DIR", help="new folder for the checkpoint; for gguf a new file")
    # The short help has them among its examples.
    dry = result.add_argument(
        "--dry-run",
        action="store_true",
        help="print memory and time instead, for a folder from config.json alone; --memory then limits everything, the "
        "model included",
    )
    grids = result.add_argument(
        "--table",
        type=several_bits,
        metavar="2,3,4",
        help="print size and estimated KL for each of these bits instead, from one collection",
    )
    dry.rare = grids.rare = True  # type: ignore[attr-defined]
    for name, metavar, text in _RARE:
        parser.add_argument(f"--{name}", metavar=metavar, help=text).rare = True  # type: ignore[attr-defined]
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave these tensors of the model's files bit for bit as they are; repeatable",
    ).rare = True  # type: ignore[attr-defined]
    add_quantizer(parser, model=True)
    add_text(parser, "calibration", CalibrationTake)
    add_source(parser, several=True)
    add_format(parser, default=NATIVE.name, quantized=True)
    add_gate(parser, rare=True)
    hooks.add_hooks(parser, "quantize")
    add_execution(parser)


def run(args: argparse.Namespace) -> int:
    """Quantize and print a table of the layers."""
    if args.out is None:
        target = quantized_format(args.format)
        config = quant_config(args, adopt_like(args)).for_format(target.own, target.outside)
        return _instead(args, config)
    job = _Command.of(args)
    ranks, shown = ranks_of_environment()
    # The measured card belongs to the output: a run that is killed before it has not ended.
    with kept(job.out) if job.text is not None and ranks is None else contextlib.nullcontext():
        with shown as progress:
            result, lines = job.quantize(progress, ranks)
        if ranks is not None and ranks.rank > 0:
            return 0
        print_checkpoint(result, str(job.out) if job.target.own else None)
        print("".join(f"{line}\n" for line in lines), end="")
        rounds = job.target.holds_tables and job.config.outside is None and job.config.fit is None
        print(whole(job.out, result, rounds_outside=rounds))
        finished = job.finished(result)
        lines = [write(finished) for write in job.pages]
        print("".join(f"{line}\n" for line in lines if line), end="")
    if job.is_plain:
        print(_HINT, file=sys.stderr)
    return 0


def _instead(args: argparse.Namespace, config: QuantConfig) -> int:
    """Print what `--dry-run` or `--table` asks for instead of an output."""
    if args.dry_run:
        return dry_run(args, config)
    return GridTable.of(args, config).print()


@dataclass(frozen=True)
class _Command:
    """A checked command with its model and prompts.

    `depths` has the options once for each depth; the last depth is that of the card and the page. `text` has the
    held-out prompts of `--evaluate`, `pages` what the hooks of guests write.
    """

    depths: list[argparse.Namespace]
    n_steps: Any
    target: Format
    options: FormatOptions
    config: QuantConfig
    loaded: LoadedModel
    tokens: TokenSet
    text: TokenSet | None
    pages: list[Callable[[Finished], str]]

    @classmethod
    def of(cls, args: argparse.Namespace) -> _Command:
        """Check the options and load. Invalid input is rejected first, because loading a large model takes minutes."""
        target = quantized_format(args.format)
        options = target.taken(format_options(args))
        check_out(Path(args.out))
        config = quant_config(args, adopt_like(args)).for_format(target.own, target.outside)
        pages = hooks.asked(args, "quantize")
        loaded = load_source(args)
        n_steps, depths = args.n_steps, each_depth(args)
        gate = Gate(**gate_options(args))
        refuse_early(loaded, config, args.format, depths[-1].n_steps, gate, options)
        tokens = calibration_tokens(
            loaded, args.calibration, calibration_take(args), matters=config.reads_text
        )
        text = None
        if args.evaluate:
            text = evaluation_tokens(loaded, None if args.evaluate == "-" else args.evaluate, take(args))
        return cls(depths, n_steps, target, options, config, loaded, tokens, text, pages)

    @property
    def args(self) -> argparse.Namespace:
        """Options at the last depth."""
        return self.depths[-1]

    @property
    def out(self) -> Path:
        """Place of the output."""
        return Path(self.args.out)

    @property
    def is_plain(self) -> bool:
        """Whether the settings are the default ones of their bits and groups."""
        grid = self.config.layer.grid
        plain = LayerConfig.of(bits=grid.bits, group_size=grid.group_size, levels=grid.levels)
        return self.config.layer == plain and self.config.fit is None

    def quantize(self, progress: Progress, ranks: Ranks | None) -> tuple[Checkpoint, list[str]]:
        """Quantize and write the output. Return the checkpoint and what its format reports."""
        lines: list[str] = []

        def write(checkpoint: Checkpoint) -> None:
            lines.extend(self._export(checkpoint).lines())

        result = loopq.quantize(
            self.loaded,
            self.tokens,
            self.config,
            out=self.out,
            n_steps=self.n_steps,
            write=None if self.target.own else write,
            progress=progress,
            ranks=ranks,
            keep=self.args.keep,
            **given(self.args, Execution),
        )
        return result, lines

    def _export(self, checkpoint: Checkpoint) -> Exported:
        args, gate = self.args, Gate(**gate_options(self.args))
        proof = Proof(trust_remote_code=args.trust_remote_code)
        try:
            return exported(checkpoint, self.out, args.format, gate, proof, self.options)
        except LoopqError:
            print(
                f"{work_folder(self.out)}: what was solved is kept here: the same command with another --format goes "
                "on from it",
                file=sys.stderr,
            )
            raise

    def finished(self, result: Checkpoint) -> Finished:
        """Print measurements at every depth, if they are asked for. Return what hooks need, of the last depth."""
        args, measured = self.args, None
        if self.text is not None:
            checkpoints = {str(self.out): read_any(self.out) if self.target.reads else result}
            for one in self.depths:
                summaries, said = measure(one, self.loaded, checkpoints, self.text)
                print_measured(summaries, said)
            measured = HeldOut(self.text, summaries, said)
        return Finished(
            source_words(args),
            str(args.model or args.python),
            self.loaded,
            {str(self.out): result},
            args.n_steps,
            execution(args),
            measured,
            Quantized(self.config, self.tokens, None if self.target.one_file else self.out),
        )


COMMANDS.register("quantize")(
    Command(
        "quantize a looped model over its trajectory",
        add,
        run,
        10,
        epilog=_EXAMPLES,
        keeps=lambda args: None if args.out is None else work_folder(args.out),
        together=True,
    )
)
