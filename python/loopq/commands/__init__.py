"""The commands of `loopq`, one file each. Subpackages such as `loopq.paper` add theirs.

Every start of `loopq` imports all of these files. A command therefore imports torch, and anything that `loopq` does
not import, inside its functions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loopq.settings.registry import Registry


@dataclass(frozen=True)
class Command:
    """One command.

    Parameters
    ----------
    help : str
        One line.
    add : callable
        Adds the command's options to its parser.
    run : callable
        Runs the command and returns the exit code.
    order : int
        Place in the list of commands.
    epilog : str
        Examples, printed below the options.
    keeps : callable
        Place where an interrupted run of these options keeps finished work. None if it keeps nothing.
    together : bool
        Whether processes started by torchrun divide the work.
    """

    help: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    order: int
    epilog: str = ""
    keeps: Callable[[argparse.Namespace], Path | None] = lambda args: None
    together: bool = False


COMMANDS: Registry[Command] = Registry(
    "command",
    "loopq.commands",
    removed={"systems": "`loopq check` lists the systems, and `loopq check MODEL` tests a model"},
)

__all__ = ["COMMANDS", "Command"]
