"""`loopq quantize`: the main job."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import loopq
from loopq import config as defaults
from loopq.commands import COMMANDS, Command
from loopq.commands.options import (
    add_beyond,
    add_format,
    add_model,
    add_quantizer,
    add_text,
    allocate_config,
    load,
    memory,
    quant_config,
    tune_config,
)
from loopq.commands.output import print_checkpoint
from loopq.errors import CheckpointError
from loopq.progress import Line


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the checkpoint")
    add_format(parser, default="native")
    add_text(parser, "calibration", defaults.CALIBRATION_PROMPTS)
    add_quantizer(parser)
    add_beyond(parser)
    parser.add_argument(
        "--include", action="append", default=[], metavar="PATTERN", help="quantize these layers too"
    )
    parser.add_argument(
        "--memory", type=memory, help="limit for Hessians, as in 8G: more passes over the text"
    )


def run(args: argparse.Namespace) -> int:
    """Quantize and print a table of the layers."""
    loaded = load(args)
    out = Path(args.out)
    native = args.format == "native"
    if not native and out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out}: exists and is not empty; choose a new folder")
    # Another format is written from the native checkpoint, which stays until the export has been checked.
    solved = out if native else out.with_name(f"{out.name}.native")
    with Line() as progress:
        result = loopq.quantize(
            loaded,
            args.calibration,
            quant_config(args),
            out=solved,
            n_steps=args.n_steps,
            n_prompts=args.n_prompts,
            seq_len=args.seq_len,
            batch_size=args.batch_size,
            seed=args.seed,
            memory=args.memory,
            threads=args.threads,
            progress=progress,
            allocate=allocate_config(args),
            tune=tune_config(args),
            n_held_out=args.held_out,
        )
    print_checkpoint(result, str(solved))
    if not native:
        from loopq.export import export

        exported = export(
            solved, out, args.format, ragged=args.ragged, trust_remote_code=args.trust_remote_code
        )
        print("\n".join(exported.lines()))
        shutil.rmtree(solved)
    return 0


COMMANDS.register("quantize")(Command("quantize a looped model over its trajectory", add, run, 10))
