"""`loopq systems`: the looped systems that loopq has an adapter for."""

from __future__ import annotations

import argparse

from loopq.commands import COMMANDS, Command
from loopq.table import render


def add(parser: argparse.ArgumentParser) -> None:
    """There are no options."""


def run(args: argparse.Namespace) -> int:
    """Print a table of the systems."""
    from loopq.systems import SYSTEMS

    rows = [
        (
            name,
            (cls.__doc__ or "").strip().splitlines()[0],
            cls.output,
            "yes" if cls.has_steps else "no",
            "random" if cls.state_is_random else "fixed",
        )
        for name, cls in SYSTEMS
    ]
    print(render(("system", "models", "output", "single step", "initial state"), rows))
    return 0


COMMANDS.register("systems")(Command("list the looped systems", add, run, 40))
