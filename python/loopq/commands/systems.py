"""`loopq systems`: the looped systems that loopq has an adapter for."""

from __future__ import annotations

import argparse

from loopq.commands import COMMANDS, Command
from loopq.table import render


def add(parser: argparse.ArgumentParser) -> None:
    """There are no options."""


def run(args: argparse.Namespace) -> int:
    """Print a table of the systems."""
    from loopq.systems.check import systems_table

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


COMMANDS.register("systems")(Command("list the looped systems", add, run, 40))
