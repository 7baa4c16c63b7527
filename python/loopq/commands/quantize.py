"""`loopq quantize`: the main job."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import loopq
from loopq.calibrate.data import TokenSet
from loopq.calibrate.prompts import CalibrationTake, calibration_tokens, evaluation_tokens
from loopq.commands import COMMANDS, Command
from loopq.commands.card import card_of
from loopq.commands.diagnose import QUICK
from loopq.commands.evaluate import for_page, measure, print_measured
from loopq.commands.options import (
    add_execution,
    add_format,
    add_quantizer,
    add_source,
    add_text,
    adopt_like,
    calibration_take,
    check_place,
    each_depth,
    format_options,
    given,
    load_source,
    quant_config,
    ranks_of_environment,
    take,
)
from loopq.commands.output import print_checkpoint
from loopq.commands.page import known
from loopq.diagnosis.config import DiagnoseConfig
from loopq.errors import LoopqError
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.convert import read_any
from loopq.formats.native import NATIVE
from loopq.lazy import require
from loopq.models.load import LoadedModel
from loopq.quantizers.config import LayerConfig
from loopq.report.page import write_page
from loopq.run.export import Exported, exported, quantized_format, refuse_early
from loopq.settings.execution import Execution
from loopq.storage.lock import check_out, kept, work_folder
from loopq.terminal.progress import Line

_HINT = "hint: --preset best is more accurate at the same bytes, and slower"
_EXAMPLES = """examples:
  loopq quantize MODEL --out DIR                   INT4, groups of 128
  loopq quantize MODEL --out DIR --preset best     more accurate, slower
  loopq quantize MODEL --out DIR --bits 3 --group-size 32 --calibration text.txt
  loopq quantize MODEL --out DIR --fit 12GB        grids that fit a size
`loopq evaluate MODEL DIR` says how far the result is from the original;
docs/quantizers.md has measured comparisons"""


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
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="new folder for the checkpoint; for gguf a new file"
    )
    for name, metavar, text in _RARE:
        parser.add_argument(f"--{name}", metavar=metavar, help=text).rare = True  # type: ignore[attr-defined]
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave these tensors of the model's files bit for bit as they are; repeatable",
    ).rare = True  # type: ignore[attr-defined]
    parser.add_argument(
        "--requantize", action="store_true", help="take a folder that loopq wrote as the model"
    ).rare = True  # type: ignore[attr-defined]
    add_quantizer(parser, model=True)
    add_text(parser, "calibration", CalibrationTake)
    add_source(parser, several=True)
    add_format(parser, default=NATIVE.name, quantized=True)
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="write a page: what was done to every weight, its error at every step, with --evaluate KL and prompts, "
        f"and a diagnosis ({', '.join(QUICK)})",
    ).rare = True  # type: ignore[attr-defined]
    add_execution(parser)


def run(args: argparse.Namespace) -> int:
    """Quantize and print a table of the layers."""
    # Invalid input is rejected before the model is loaded, because loading a large one takes minutes.
    out = Path(args.out)
    target = quantized_format(args.format)
    options = target.taken(format_options(args))
    check_out(out)
    config = quant_config(args, adopt_like(args)).for_format(target.own)
    if args.html:
        require("matplotlib")
        check_place(args.html)
    loaded = load_source(args)
    n_steps = args.n_steps
    *others, args = each_depth(args)
    refuse_early(loaded, config, args.format, args.n_steps, **options)
    reports: list[Exported] = []

    def write(checkpoint: Checkpoint) -> None:
        reports.append(_export(args, out, checkpoint, options))

    tokens = calibration_tokens(loaded, args.calibration, calibration_take(args), matters=config.reads_text)
    if args.evaluate:
        text = evaluation_tokens(loaded, None if args.evaluate == "-" else args.evaluate, take(args))
    ranks, shown = ranks_of_environment()
    # The measured card belongs to the output: a run that is killed before it has not ended.
    with kept(out) if args.evaluate and ranks is None else contextlib.nullcontext():
        with shown as progress:
            result = loopq.quantize(
                loaded,
                tokens,
                config,
                out=out,
                n_steps=n_steps,
                write=None if target.own else write,
                progress=progress,
                ranks=ranks,
                keep=args.keep,
                **given(args, Execution),
            )
        if ranks is not None and ranks.rank > 0:
            return 0
        print_checkpoint(result, str(out) if target.own else None)
        print("".join(f"{line}\n" for found in reports for line in found.lines()), end="")
        measured = None
        if args.evaluate:
            written = read_any(out) if target.reads else result
            for one in others:
                print_measured(*measure(one, loaded, {str(out): written}, text))
            summaries, said = measure(args, loaded, {str(out): written}, text)
            measured = for_page(args, loaded, text, summaries, said)
            print_measured(summaries, said)
            if not target.one_file:
                print(f"model card: {card_of(args, loaded, str(out), summaries, said)}")
    if args.html:
        found = known(args, loaded, {str(out): result}, text if args.evaluate else tokens)
        write_page(
            args.html, diagnosis=_diagnosis(args, config.layer, loaded, tokens), measured=measured, **found
        )
        print(f"page: {args.html}")
    plain = LayerConfig.of(bits=config.layer.grid.bits, group_size=config.layer.grid.group_size)
    if config.layer == plain and config.fit is None:
        print(_HINT, file=sys.stderr)
    return 0


def _export(
    args: argparse.Namespace, out: Path, checkpoint: Checkpoint, options: Mapping[str, Any]
) -> Exported:
    try:
        return exported(checkpoint, out, args.format, trust_remote_code=args.trust_remote_code, **options)
    except LoopqError:
        print(
            f"{work_folder(out)}: what was solved is kept here: the same command with another --format goes on from it",
            file=sys.stderr,
        )
        raise


def _diagnosis(
    args: argparse.Namespace, layer: LayerConfig, loaded: LoadedModel, tokens: TokenSet
) -> dict[str, Any]:
    """Diagnose the model before quantization on the calibration prompts."""
    with Line() as progress:
        return loopq.diagnose(
            loaded,
            tokens,
            DiagnoseConfig(bits=layer.grid.bits, group_size=layer.grid.group_size),
            n_steps=args.n_steps,
            only=QUICK,
            name=args.model or args.python,
            progress=progress,
            **given(args, Execution),
        )


COMMANDS.register("quantize")(
    Command(
        "quantize a looped model over its trajectory",
        add,
        run,
        10,
        epilog=_EXAMPLES,
        keeps=lambda args: work_folder(args.out),
        together=True,
    )
)
