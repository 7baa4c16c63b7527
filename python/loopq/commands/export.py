"""`loopq export`: write checkpoints that other tools load."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loopq.commands import COMMANDS, Command
from loopq.commands.options import add_format, add_gate, format_options, gate_options
from loopq.run.destination import export
from loopq.terminal.text import one_a_line, say


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "folder",
        metavar="DIR",
        help="checkpoint of any format that loopq reads; for gguf a model that is not quantized too; for imatrix a "
        "calibration dump",
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="new folder; for gguf and imatrix a new file"
    )
    add_format(parser)
    add_gate(parser)
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code that came with the model, to compare logits",
    )


@dataclass(frozen=True)
class _Export:
    """What to export, where, in which format or for which engine, and with which options."""

    folder: str
    out: str
    format: str | None
    options: Mapping[str, Any]

    @classmethod
    def of(cls, args: argparse.Namespace) -> _Export:
        """Read the options."""
        options = format_options(args)
        options |= {"trust_remote_code": args.trust_remote_code, **gate_options(args)}
        return cls(args.folder, args.out, args.format, options)


def run(args: argparse.Namespace) -> int:
    """Write the format, read it back, compare, and print its size."""
    asked = _Export.of(args)
    done = export(asked.folder, asked.out, asked.format, **asked.options)
    say(one_a_line(done.lines()))
    return 0


COMMANDS.register("export")(Command("write a checkpoint in a format that other tools load", add, run, 20))
