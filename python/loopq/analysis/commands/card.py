"""`loopq card`: the model card of a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loopq.analysis.report.card import check_card, write_card
from loopq.calibrate.prompts import CHUNK, evaluation_chunks
from loopq.commands import COMMANDS, Command
from loopq.commands.evaluate import measure
from loopq.commands.hooks import HOOKS, Finished, Hook
from loopq.commands.options import add_execution, add_text, take
from loopq.commands.source import add_source, load, source_words
from loopq.formats.convert import check_readable, read_any
from loopq.models.load import LoadedModel

_EXAMPLES = """examples:
  loopq card DIR                                   what it is and how it was made
  loopq card DIR MODEL --text held-out.txt         also how far it is from the model, with a picture
  hf upload OWNER/NAME DIR                         then uploads the folder to the hub"""


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
    card = _card(args)
    print(f"model card: {card}")
    print(f"upload it: hf upload OWNER/NAME {card.parent}")
    return 0


def _card(args: argparse.Namespace) -> Path:
    """Write the card, with measurements if there is a model."""
    if args.model is None and args.python is None:
        return write_card(Path(args.folder), None, None, (), {})
    loaded = load(args)
    tokens = evaluation_chunks(loaded, args.text, take(args, CHUNK))
    summaries, said = measure(args, loaded, {args.folder: read_any(args.folder)}, tokens)
    model, source = str(args.model or args.python), source_words(args)
    return card_of(args.folder, model, loaded, source, summaries, said)


def card_of(
    folder: str | Path,
    model: str,
    loaded: LoadedModel,
    source: Sequence[str],
    summaries: Sequence[Any],
    said: Mapping[str, Any],
) -> Path:
    """Write the model card of a measured checkpoint. Return its place."""
    measured = [summaries[0], {**summaries[1], "name": "quantized"}]
    return write_card(Path(folder), model, loaded.folder, measured, said, source)


def _asked(args: argparse.Namespace, command: str) -> Callable[[Finished], str] | None:
    """Write a card of each checkpoint that `quantize` measures."""
    return _finish if command == "quantize" and args.evaluate else None


def _finish(finished: Finished) -> str:
    made, measured = finished.quantized, finished.measured
    if made is None or measured is None or made.folder is None:
        return ""  # a file has no card
    loaded, rows = finished.loaded, measured.summaries
    card = card_of(made.folder, finished.model, loaded, finished.source, rows, measured.about)
    return f"model card: {card}"


HOOKS.register("card")(Hook(lambda parser, command: None, _asked))
COMMANDS.register("card")(Command("write a checkpoint's model card", add, run, 14, epilog=_EXAMPLES))
