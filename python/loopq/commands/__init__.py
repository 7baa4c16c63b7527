"""The commands of `loopq`, one file each: NAME, a help line, its options, and what it does."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from loopq.registry import Registry


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
    """

    help: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    order: int


COMMANDS: Registry[Command] = Registry("command", "loopq.commands")

__all__ = ["COMMANDS", "Command"]
