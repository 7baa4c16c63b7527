"""`loopq systems`: looped systems with an adapter in loopq, and requirements of published models."""

from __future__ import annotations

import argparse

from loopq.commands import COMMANDS, Command
from loopq.models.check import systems_table
from loopq.models.needs import needs
from loopq.terminal.table import render


def add(parser: argparse.ArgumentParser) -> None:
    """Add the argument."""
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="show what these published models, systems of the table or folders need to be loaded",
    )


def run(args: argparse.Namespace) -> int:
    """Print a table of the systems, or the requirements of models."""
    if args.models:
        print("\n\n".join(map(_needs, args.models)))
        return 0
    rows = [
        (
            row.name,
            row.summary,
            ", ".join(f"{name}: {count}" for name, count in row.checkpoints) or None,
            ", ".join(row.exposed) or None,
        )
        for row in systems_table()
    ]
    print(render(("system", "loop", "weights quantized", "feedback-exposed"), rows))
    return 0


def _needs(model: str) -> str:
    lines = needs(model)
    width = max(len(subject) for subject, _ in lines)
    return "\n".join(f"{subject:{width}}  {text}" for subject, text in lines)


COMMANDS.register("systems")(Command("list the looped systems, or what models need", add, run, 40))
