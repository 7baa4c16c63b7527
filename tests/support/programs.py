"""The program in a separate process."""

from __future__ import annotations

from loopq.commands import COMMANDS, Command


def replaced(monkeypatch, name, run):
    """Put a function in the place of what a command does."""
    command = COMMANDS.get(name)
    monkeypatch.setitem(COMMANDS._entries, name, Command(command.help, command.add, run, command.order))
