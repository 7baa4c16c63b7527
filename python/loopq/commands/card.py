"""`loopq card`: the model card of a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loopq.calibrate.prompts import CHUNK, evaluation_chunks
from loopq.commands import COMMANDS, Command
from loopq.commands.evaluate import measure
from loopq.commands.options import add_execution, add_source, add_text, load, take
from loopq.formats.convert import check_readable, read_any
from loopq.models.load import LoadedModel
from loopq.report.card import check_card, write_card

_EXAMPLES = """examples:
  loopq card DIR                                   what it is and how it was made
  loopq card DIR MODEL --text held-out.txt         also how far it is from the model, with a picture"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("folder", metavar="DIR", help="checkpoint of any format that loopq reads")
    add_source(parser, "the full-precision model, to measure DIR against it")
    add_text(parser, "text")
    add_execution(parser, only=("seed", "batch_size"))


def run(args: argparse.Namespace) -> int:
    """Measure and write."""
    check_readable(args.folder)
    check_card(Path(args.folder))
    if args.model is None and args.python is None:
        print(f"model card: {write_card(Path(args.folder), None, None, (), {})}")
        return 0
    loaded = load(args)
    tokens = evaluation_chunks(loaded, args.text, take(args, CHUNK))
    summaries, said = measure(args, loaded, {args.folder: read_any(args.folder)}, tokens)
    print(f"model card: {card_of(args, loaded, args.folder, summaries, said)}")
    return 0


def card_of(
    args: argparse.Namespace,
    loaded: LoadedModel,
    folder: str,
    summaries: Sequence[Any],
    said: Mapping[str, Any],
) -> Path:
    """Write the model card of a measured checkpoint. Return its place."""
    measured = [summaries[0], {**summaries[1], "name": "quantized"}]
    return write_card(Path(folder), str(args.model or args.python), loaded.folder, measured, said)


COMMANDS.register("card")(Command("write a checkpoint's model card", add, run, 14, epilog=_EXAMPLES))
