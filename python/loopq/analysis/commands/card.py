"""`loopq card`: the model card of a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loopq.analysis.report.card import check_card, write_card
from loopq.calibrate.prompts import CHUNK, Take, evaluation_chunks
from loopq.commands import COMMANDS, Command
from loopq.commands.evaluate import measure
from loopq.commands.hooks import HOOKS, Finished, HeldOut, Hook
from loopq.commands.options import add_execution, add_text, execution, take
from loopq.commands.source import ModelOptions, add_source
from loopq.formats.convert import check_readable, read_any
from loopq.models.load import LoadedModel
from loopq.settings.execution import Execution
from loopq.terminal.text import say

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
    card = _Card.of(args).write()
    say(f"model card: {card}")
    say(f"upload it: hf upload OWNER/NAME {card.parent}")
    return 0


@dataclass(frozen=True)
class _Card:
    """A checkpoint, and how it is measured if a model is named."""

    folder: Path
    source: ModelOptions
    text: str | None
    take: Take
    execution: Execution

    @classmethod
    def of(cls, args: argparse.Namespace) -> _Card:
        """Read and check the options."""
        folder = Path(args.folder)
        check_readable(folder)
        check_card(folder)
        return cls(folder, ModelOptions.of(args), args.text, take(args, CHUNK), execution(args))

    def write(self) -> Path:
        """Write the card, with measurements if there is a model."""
        source, folder = self.source, self.folder
        if source.model is None and source.python is None:
            return write_card(folder, None, None, (), {})
        loaded = source.load()
        tokens = evaluation_chunks(loaded, self.text, self.take)
        checkpoints = {str(folder): read_any(folder)}
        return card_of(
            folder, source, loaded, measure(loaded, checkpoints, tokens, source.depth, self.execution)
        )


def card_of(folder: Path, source: ModelOptions, loaded: LoadedModel, measured: HeldOut) -> Path:
    """Write the model card of a measured checkpoint. Return its place."""
    full, quantized = measured.summaries
    rows = [full, {**quantized, "name": "quantized"}]
    return write_card(folder, source.name, loaded.folder, rows, measured.about, source.words())


def _add(parser: argparse.ArgumentParser, command: str) -> None:
    """Say in the help of `--evaluate` that it writes a card."""
    for action in parser._actions:
        if command == "quantize" and action.dest == "evaluate":
            action.help = f"{action.help} and write a model card"


def asked(args: argparse.Namespace, command: str) -> Callable[[Finished], str] | None:
    """Write a card of each checkpoint that `quantize` measures."""
    return _finish if command == "quantize" and args.evaluate else None


def _finish(finished: Finished) -> str:
    made, measured = finished.quantized, finished.measured
    if made is None or measured is None or made.folder is None:
        return ""  # a file has no card
    return f"model card: {card_of(made.folder, finished.source, finished.loaded, measured)}"


HOOKS.register("card")(Hook(_add, asked))
COMMANDS.register("card")(Command("write a checkpoint's model card", add, run, 14, epilog=_EXAMPLES))
