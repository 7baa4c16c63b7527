"""The command line: `loopq COMMAND`; the commands are in `loopq.commands`."""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import loopq
from loopq.commands import COMMANDS, Command
from loopq.errors import ConfigError, LoopqError


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: the whole usage of a command fills a screen and hides what was wrong."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is; exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message} (`{self.prog} --help` lists the options)\n")


def parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    top = _Parser(prog="loopq", description="Quantizer for looped (recurrent-depth) transformers.")
    top.add_argument("--version", action="version", version=f"loopq {loopq.__version__}")
    top.add_argument(
        "--python",
        metavar="FILE",
        action="append",
        default=[],
        help="run this Python file first; it may register model classes and adapters (may be repeated)",
    )
    subs = top.add_subparsers(required=True, metavar="COMMAND")
    for name, command in sorted(COMMANDS, key=lambda entry: entry[1].order):
        sub = subs.add_parser(
            name,
            help=command.help,
            description=command.help,
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add(sub)
        sub.usage = _usage(sub)
        sub.set_defaults(run=command.run, command=command)
    return top


def _usage(sub: argparse.ArgumentParser) -> str:
    """What a command cannot do without; the list of options below says the rest."""
    parts = [sub.prog]
    optional = False
    for action in sub._actions:
        name = action.metavar or (
            f"{{{','.join(action.choices)}}}" if action.choices else action.dest.upper()
        )
        if not action.option_strings:
            more = f" [{name} ...]" if action.nargs == "+" else ""
            parts.append(f"[{name} ...]" if action.nargs == "*" else f"{name}{more}")
        elif action.required:
            parts.append(f"{action.option_strings[0]} {name}")
        else:
            optional = optional or action.dest != "help"
    # A percent sign would be read as a field to fill in.
    return " ".join([*map(str, parts), *(["[options]"] if optional else [])]).replace("%", "%%")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0 done, 1 an error, 2 wrong usage, 130 interrupted."""
    # Threads of torch that spin while they wait take a busy machine's cores from those that work: rollouts of small
    # models took up to fifteen times as long. It is read when torch is loaded, and changes no result.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A closed pipe (`loopq inspect ... | head`) ends the program as it ends any other.
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    args = parser().parse_args(argv)
    try:
        for file in args.python:
            _run_file(Path(file))
        code: int = args.run(args)
        return code
    except LoopqError as error:
        print(f"loopq: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        # Files that loopq reads and writes have messages of their own; this is for what is left.
        place = f"{error.filename}: " if error.filename else ""
        print(f"loopq: error: {place}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"loopq: interrupted; {_left_behind(args)}", file=sys.stderr)
        return 130


def _run_file(path: Path) -> None:
    """Run a file as `python FILE` would: modules beside it can be imported."""
    if not path.is_file():
        raise ConfigError(f"--python {path}: no such file")
    sys.path.insert(0, str(path.resolve().parent))
    runpy.run_path(str(path))


def _left_behind(args: argparse.Namespace) -> str:
    """What an interrupted command has kept."""
    command: Command = args.command
    place = command.keeps(args)
    if place is not None and place.exists():
        return f"what is done is kept in {place}: the same command goes on from there"
    return "nothing is kept: the same command starts anew"


if __name__ == "__main__":
    sys.exit(main())
