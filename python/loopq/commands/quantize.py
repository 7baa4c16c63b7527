"""`loopq quantize`: the main job."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import loopq
from loopq.calibrate.data import TokenSet
from loopq.calibrate.prompts import CalibrationTake, Take, calibration_tokens, evaluation_tokens
from loopq.commands import COMMANDS, Command, hooks
from loopq.commands.evaluate import measure, print_measured
from loopq.commands.hooks import Finished, Quantized
from loopq.commands.options import (
    add_execution,
    add_format,
    add_gate,
    add_quantizer,
    add_text,
    adopt_like,
    calibration_take,
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
from loopq.commands.source import ModelOptions, add_source
from loopq.errors import LoopqError
from loopq.formats.base import Format, FormatOptions
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.convert import read_any
from loopq.formats.native import NATIVE
from loopq.models.load import LoadedModel
from loopq.quantizers.config import LayerConfig
from loopq.run.config import PRESETS, QuantConfig
from loopq.run.destination import Choice, Wanted, last_lines
from loopq.run.export import Exported, exported, quantized_format, refuse_early
from loopq.run.gate import LOOPQ, Gate, Proof
from loopq.run.ranks import Ranks
from loopq.settings.execution import Execution
from loopq.storage.lock import check_out, kept, work_folder
from loopq.terminal.progress import Progress
from loopq.terminal.text import say

_HINT = "hint: --preset best is more accurate at the same bytes, and slower"
_EXAMPLES = """examples:
  loopq quantize MODEL --out DIR                   INT4, groups of 128
  loopq quantize MODEL --out DIR --for vllm        the same for vLLM: compressed-tensors, even levels
  loopq quantize MODEL --out DIR --preset best     more accurate, slower
  loopq quantize MODEL --out DIR --bits 3 --group-size 32 --calibration text.txt
  loopq quantize MODEL --out DIR --fit 12GB        grids that fit a size
  loopq quantize MODEL --dry-run                   memory and time of the same
  loopq quantize MODEL --table 2,3,4               size and estimated KL of three grids
`loopq evaluate MODEL DIR` says how far the result is from the original;
docs/comparison.md has measured comparisons"""


#: What the short help shows; its examples show more.
_COMMON = (
    "model", "out", "engine", "preset", "bits", "group_size", "set", "calibration", "n_prompts", "seq_len", "n_steps",
    "help_all", "help",
)  # fmt: skip
_RARE = (
    ("like", "DIR", "take the settings of that checkpoint, its depth and its seed; options change them"),
    (
        "evaluate",
        "FILE",
        "measure the result on this held-out text (-: the one that ships with loopq)",
    ),
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    result = parser.add_mutually_exclusive_group(required=True)
    result.add_argument("--out", metavar="DIR", help="new folder for the checkpoint; for gguf a new file")
    result.add_argument(
        "--dry-run",
        action="store_true",
        help="print memory and time instead, for a folder from config.json alone; --memory then limits everything, the "
        "model included",
    )
    result.add_argument(
        "--table",
        type=several_bits,
        metavar="2,3,4",
        help="print size and estimated KL for each of these bits instead, from one collection",
    )
    add_format(parser, quantized=True)
    for name, metavar, text in _RARE:
        parser.add_argument(f"--{name}", metavar=metavar, help=text)
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave these tensors of the model's files bit for bit as they are; repeatable",
    )
    add_quantizer(parser, model=True)
    add_text(parser, "calibration", CalibrationTake)
    add_source(parser, several=True)
    add_gate(parser)
    hooks.add_hooks(parser, "quantize")
    add_execution(parser)
    for action in parser._actions:
        action.rare = action.dest not in _COMMON  # type: ignore[attr-defined]


def run(args: argparse.Namespace) -> int:
    """Quantize and print a table of the layers, or what `--dry-run` or `--table` ask for instead."""
    asked = _Options.of(args)
    if args.dry_run:
        return dry_run(asked.source, asked.execution, asked.config, asked.take)
    if args.table:
        table = GridTable.of(
            asked.source, asked.calibration, asked.take, asked.config, args.table, asked.execution
        )
        return table.print()
    job = _Job.of(asked)
    asked = job.asked
    ranks, shown = ranks_of_environment()
    # The measured card belongs to the output: a run that is killed before it has not ended.
    with kept(asked.out) if job.text is not None and ranks is None else contextlib.nullcontext():
        with shown as progress:
            if job.choice is not None:
                progress.note(job.choice.line())
            result, lines = job.quantize(progress, ranks)
        if ranks is not None and ranks.rank > 0:
            return 0
        print_checkpoint(result, str(asked.out) if asked.target.own else None)
        say("".join(f"{line}\n" for line in lines), end="")
        rounds = asked.target.holds_tables and asked.config.outside is None and asked.config.fit is None
        say(whole(asked.out, result, rounds_outside=rounds))
        finished = job.finished(result)
        lines = [write(finished) for write in asked.pages] + job.last_lines()
        say("".join(f"{line}\n" for line in lines if line), end="")
    if asked.is_plain:
        say(_HINT, file=sys.stderr)
    return 0


@dataclass(frozen=True)
class _Options:
    """Checked options. `text` is the file of `--evaluate`, `pages` what the hooks of guests write."""

    source: ModelOptions
    out: Path
    engine: str | None
    given: frozenset[str]
    config: QuantConfig
    calibration: str | None
    take: CalibrationTake
    execution: Execution
    target: Format
    options: FormatOptions
    format_options: Mapping[str, Any]
    gate: Gate
    keep: Sequence[str]
    text: str | None
    text_take: Take
    pages: Sequence[Callable[[Finished], str]]

    @classmethod
    def of(cls, args: argparse.Namespace) -> _Options:
        """Read and check the options."""
        engine = None if args.format else args.engine or LOOPQ
        target = quantized_format(args.format or NATIVE.name)
        # Those of an engine are read when its format is known.
        options = target.values() if engine else target.taken(format_options(args))
        if args.out is not None:
            check_out(Path(args.out))
        args, base = adopt_like(args)
        config = quant_config(args, base)
        if engine in (None, LOOPQ) or args.out is None:
            config = config.for_format(target.own and engine in (None, LOOPQ), target.outside)
        plain = QuantConfig().flat()
        # What --like takes over at its default stays open to the engine.
        like = (name for name, value in (base.flat() if base else {}).items() if value != plain.get(name))
        changed = {*given(args, QuantConfig), *PRESETS.get(args.preset, ()), *like}
        return cls(
            engine=engine,
            given=frozenset(changed),
            format_options=format_options(args),
            pages=hooks.asked(args, "quantize"),
            source=ModelOptions.of(args),
            out=Path(args.out or ""),
            config=config,
            calibration=args.calibration,
            take=calibration_take(args),
            execution=execution(args),
            target=target,
            options=options,
            gate=Gate(**gate_options(args)),
            keep=args.keep,
            text=args.evaluate,
            text_take=take(args),
        )

    @property
    def is_plain(self) -> bool:
        """Whether the settings are the default ones of their bits and groups."""
        grid = self.config.layer.grid
        plain = LayerConfig.of(bits=grid.bits, group_size=grid.group_size, levels=grid.levels)
        return self.config.layer == plain and self.config.fit is None


@dataclass(frozen=True)
class _Job:
    """A command with its model and prompts.

    `text` has the held-out prompts of `--evaluate`, `choice` how the model is written for the engine, `others` the
    engines that it could be written for as well.
    """

    asked: _Options
    loaded: LoadedModel
    tokens: TokenSet
    text: TokenSet | None
    choice: Choice | None
    others: Sequence[str]

    @classmethod
    def of(cls, asked: _Options) -> _Job:
        """Load. Invalid input is rejected first, because a run takes long."""
        loaded, choice, others = asked.source.load(), None, []
        if asked.engine is None:
            refuse_early(
                loaded, asked.config, asked.target.name, asked.source.depth, asked.gate, asked.options
            )
        else:
            wanted = Wanted(
                loaded, asked.config, asked.given, asked.format_options, asked.source.depth, asked.gate
            )
            choice, others = wanted.choose(asked.engine), wanted.others(asked.engine)
            asked = replace(asked, target=choice.target, config=choice.config, options=choice.options)
        config = asked.config
        tokens = calibration_tokens(loaded, asked.calibration, asked.take, matters=config.reads_text)
        text = None
        if asked.text is not None:
            text = evaluation_tokens(loaded, None if asked.text == "-" else asked.text, asked.text_take)
        return cls(asked, loaded, tokens, text, choice, others)

    def quantize(self, progress: Progress, ranks: Ranks | None) -> tuple[Checkpoint, list[str]]:
        """Quantize and write the output. Return the checkpoint and what its format reports."""
        lines: list[str] = []

        def write(checkpoint: Checkpoint) -> None:
            lines.extend(self._export(checkpoint).lines())

        asked = self.asked
        result = loopq.quantize(
            self.loaded,
            self.tokens,
            asked.config,
            out=asked.out,
            n_steps=asked.source.n_steps,
            write=None if asked.target.own else write,
            ranks=ranks,
            keep=asked.keep,
            **asked.execution.changed(progress=progress).flat(),
        )
        return result, lines

    def _export(self, checkpoint: Checkpoint) -> Exported:
        asked = self.asked
        proof = Proof(trust_remote_code=asked.source.loading["trust_remote_code"])
        try:
            return exported(checkpoint, asked.out, asked.target.name, asked.gate, proof, asked.options)
        except LoopqError:
            say(
                f"{work_folder(asked.out)}: what was solved is kept here: the same command with another --format goes "
                "on from it",
                file=sys.stderr,
            )
            raise

    def last_lines(self) -> list[str]:
        """Return where the output runs."""
        if self.choice is None:
            return []
        return last_lines(self.choice, self.asked.out, self.others, self.asked.source.name)

    def finished(self, result: Checkpoint) -> Finished:
        """Print measurements at every depth, if they are asked for. Return what hooks need, of the last depth."""
        asked, measured = self.asked, None
        if self.text is not None:
            checkpoints = {str(asked.out): read_any(asked.out) if asked.target.reads else result}
            for depth in asked.source.depths:
                measured = measure(self.loaded, checkpoints, self.text, depth, asked.execution)
                print_measured(measured.summaries, measured.about)
        return Finished(
            asked.source,
            self.loaded,
            {str(asked.out): result},
            asked.execution,
            measured,
            Quantized(asked.config, self.tokens, None if asked.target.one_file else asked.out),
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
