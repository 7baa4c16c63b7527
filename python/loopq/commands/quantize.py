"""`loopq quantize`: the main job."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import loopq
from loopq import config as defaults
from loopq.api import calibration_tokens
from loopq.calibrate.data import TokenSet
from loopq.checkpoint.files import check_new
from loopq.checkpoint.native import Checkpoint
from loopq.commands import COMMANDS, Command
from loopq.commands.diagnose import QUICK
from loopq.commands.options import (
    add_beyond,
    add_format,
    add_model,
    add_quantizer,
    add_text,
    allocate_config,
    check_place,
    load,
    memory,
    quant_config,
    tune_config,
    work_folder,
)
from loopq.commands.output import print_checkpoint
from loopq.config import DiagnoseConfig, LayerConfig
from loopq.errors import LoopqError
from loopq.lazy import require
from loopq.progress import Line
from loopq.systems.load import LoadedModel

_HINT = (
    "hint: --preset best comes closer to full precision at the same bytes, for some gradients more (--help)"
)
_EXAMPLES = """examples:
  loopq quantize MODEL --out DIR                  GPTQ over the trajectory, INT4 g128: the paper's method
  loopq quantize MODEL --out DIR --preset best    the full solver in the loop metric: closest to full precision
  loopq quantize MODEL --out DIR --preset best --bits 3 --group-size 32 --calibration text.txt
  loopq quantize MODEL --out DIR --allocate 3.25  bits and group size of each layer under a budget
then `loopq evaluate MODEL DIR` says how far it is from the original; docs/quantizers.md has measured comparisons"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the checkpoint")
    add_format(parser, default="native")
    add_text(parser, "calibration", defaults.CALIBRATION_PROMPTS)
    add_quantizer(parser, presets=True)
    add_beyond(parser)
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="PATTERN",
        help="calibrate these layers too: those that would stay as they are, and those that would be rounded",
    )
    parser.add_argument(
        "--memory",
        type=memory,
        metavar="SIZE",
        help="limit for Hessians, as in 8G: more passes over the text",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        help=f"diagnose the model afterwards ({', '.join(QUICK)}); the page shows what was done to each layer",
    )


def run(args: argparse.Namespace) -> int:
    """Quantize and print a table of the layers."""
    # What can be refused is refused before the model is loaded, which takes minutes for a large one.
    out = Path(args.out)
    native = args.format == "native"
    check_new(out)
    config, allocate, tune = quant_config(args), allocate_config(args), tune_config(args)
    if args.html:
        require("matplotlib")
        check_place(args.html)
    loaded = load(args)
    if not native:
        from loopq.export import refuse_early

        refuse_early(loaded.system, config, args.format, args.ragged, args.n_steps)
    solved = _solved(args)
    tokens = calibration_tokens(loaded, args.calibration, n_prompts=args.n_prompts, seq_len=args.seq_len)
    with Line() as progress:
        result = loopq.quantize(
            loaded,
            tokens,
            config,
            out=solved,
            n_steps=args.n_steps,
            batch_size=args.batch_size,
            seed=args.seed,
            memory=args.memory,
            threads=args.threads,
            progress=progress,
            allocate=allocate,
            tune=tune,
            n_held_out=args.held_out,
        )
    print_checkpoint(result, str(out) if native else None)
    if not native:
        _export(args, solved, out)
    if args.html:
        _page(args, loaded, tokens, result)
    if config.layer == LayerConfig(bits=args.bits, group_size=args.group_size) and not (allocate or tune):
        print(_HINT, file=sys.stderr)
    return 0


def _solved(args: argparse.Namespace) -> Path:
    """Folder of the native checkpoint; another format is written from it, and it stays until that was checked."""
    out = Path(args.out)
    return out if args.format == "native" else out.with_name(f"{out.name}.native")


def _export(args: argparse.Namespace, solved: Path, out: Path) -> None:
    from loopq.export import export

    try:
        exported = export(
            solved, out, args.format, ragged=args.ragged, trust_remote_code=args.trust_remote_code
        )
    except LoopqError:
        print(
            f"{solved}: what was solved is kept here; `loopq export` writes it in another format",
            file=sys.stderr,
        )
        raise
    print("\n".join(exported.lines()))
    shutil.rmtree(solved)


def _page(args: argparse.Namespace, loaded: LoadedModel, tokens: TokenSet, result: Checkpoint) -> None:
    """Diagnose the model as it was, on the calibration prompts, and show it with the report of every layer."""
    from loopq.diagnose.survey import diagnose
    from loopq.report.page import write_report

    with Line() as progress:
        found = diagnose(
            loaded.system,
            tokens,
            args.n_steps,
            config=DiagnoseConfig(
                bits=args.bits, group_size=args.group_size, batch_size=args.batch_size, seed=args.seed
            ),
            only=QUICK,
            name=str(args.model),
            memory=args.memory,
            threads=args.threads,
            progress=progress,
        )
    write_report(found, args.html, quantized={name: layer.report for name, layer in result.layers.items()})
    print(f"page: {args.html}")


COMMANDS.register("quantize")(
    Command(
        "quantize a looped model over its trajectory",
        add,
        run,
        10,
        epilog=_EXAMPLES,
        keeps=lambda args: work_folder(_solved(args)),
    )
)
