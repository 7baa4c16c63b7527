"""The commands of `loopq`, one file each, here or in the `commands` of a room: help, options, and what it does.

Every start of `loopq` imports all of these files. So a command imports inside its functions what needs torch, and what
`loopq` itself does not import.
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
        Does the work; returns the exit code.
    order : int
        Place in the list of commands.
    epilog : str
        Examples, printed below the options.
    keeps : callable
        Where an interrupted run of these options keeps what is done, or None where it keeps nothing.
    together : bool
        Whether processes that torchrun started divide the work.
    """

    help: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    order: int
    epilog: str = ""
    keeps: Callable[[argparse.Namespace], Path | None] = lambda args: None
    together: bool = False


COMMANDS: Registry[Command] = Registry("command", "loopq.commands")

__all__ = ["COMMANDS", "Command"]
