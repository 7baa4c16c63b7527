"""The command line: `loopq COMMAND`; the commands are in `loopq.commands`."""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import re
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import loopq
from loopq.commands import COMMANDS, Command
from loopq.commands.settable import Set, instead, renamed
from loopq.errors import ConfigError, LoopqError
from loopq.run.ranks import Ranks
from loopq.settings.registry import did_you_mean
from loopq.storage.journal import note_run
from loopq.terminal.interrupts import INTERRUPTED, Interrupts
from loopq.terminal.text import say

_FIRST = """first steps:
  loopq demo                                     compare methods on the embedded model
  loopq quantize MODEL --out DIR                 quantize a model
  loopq evaluate MODEL DIR                       measure what that did to it
`loopq COMMAND --help` lists the options of a command"""

#: Printed characters at either end of an error. A quoted value may have any length.
_LONG = 400


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help that shows choices as a|b and keeps a command's name and text on one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)

    def _format_action(self, action: argparse.Action) -> str:
        # The line about the choice of a command would repeat the commands below it.
        commands = list(self._iter_indented_subactions(action)) if action.nargs == argparse.PARSER else []
        return "".join(map(self._format_action, commands)) or super()._format_action(action)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return (
            "|".join(map(str, action.choices))
            if action.choices
            else super()._get_default_metavar_for_optional(action)
        )

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Any:
        if action.metavar is None and action.option_strings and action.choices:
            return lambda size: (default_metavar,) * size
        return super()._metavar_formatter(action, default_metavar)


class _Parser(argparse.ArgumentParser):
    """A parser with one-line errors. Its help shows the common options first, and all with ``--help-all``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, add_help=False, allow_abbrev=False, formatter_class=_Formatter)
        self._positionals.title = "arguments"

    def add_help_options(self) -> None:
        """Add the options that print help, after all others."""
        if any(getattr(action, "rare", False) for action in self._actions):
            self.add_argument("--help-all", action=_Help, nargs=0, help="show every option and exit")
        self.add_argument("-h", "--help", action=_Help, nargs=0, help="show this and exit")

    def common_help(self) -> str:
        """Return help with the common options, each with the first sentence of its text."""
        common = [a for a in self._actions if not getattr(a, "rare", False)]
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        first = "commands" if self._subparsers else "arguments"
        for title, wanted in ((first, False), ("options", True)):
            formatter.start_section(title)
            formatter.add_arguments([_shortened(a) for a in common if bool(a.option_strings) == wanted])
            formatter.end_section()
        formatter.add_text(self.epilog)
        n_more = len(self._actions) - len(common)
        if n_more:
            formatter.add_text(f"`{self.prog} --help-all` explains these options and {n_more} more")
        return formatter.format_help()

    def _get_values(self, action: argparse.Action, given: list[str]) -> Any:
        # Commands treat an empty name as absent, so a requested page would not be written.
        if "" in given and action.option_strings and action.metavar in ("FILE", "DIR", "DUMP"):
            raise argparse.ArgumentError(action, "an empty name")
        return super()._get_values(action, given)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        removed = getattr(action, "removed", {})
        if value in removed:
            raise argparse.ArgumentError(None, f"there is no {value} any more: {removed[value]}")
        known = [str(choice) for choice in action.choices]
        raise argparse.ArgumentError(
            action, f"unknown {value!r}{did_you_mean(str(value), known)}; known: {', '.join(known)}"
        )

    def error(self, message: str) -> NoReturn:
        """Print the error and where to find help, and exit with code 2. Very long messages lose their middle."""
        if len(message) > 2 * _LONG:
            message = f"{message[:_LONG]} ... {message[-_LONG:]}"
        self.exit(2, f"{self.prog}: error: {message} (`{self.prog} --help` lists the options)\n")


def _shortened(action: argparse.Action) -> argparse.Action:
    """Return the option with the first sentence of its text, and with its default."""
    shortened = copy.copy(action)
    text = action.help or ""
    first, point, _ = text.partition(". ")
    default = re.search(r" \(default [^()]*\)$", text)
    shortened.help = f"{first}{default[0] if default else ''}" if point else text
    return shortened


class _Help(argparse.Action):
    """Print the common options, or with ``--help-all`` every one in its group."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> None:
        short = isinstance(parser, _Parser) and option != "--help-all"
        say(parser.common_help() if short else parser.format_help(), end="")  # type: ignore[attr-defined]
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    top = _Parser(
        prog="loopq", description="Quantizer for looped (recurrent-depth) transformers.", epilog=_FIRST
    )
    subs = top.add_subparsers(required=True, metavar="COMMAND", title="commands")
    subs.removed = COMMANDS.removed  # type: ignore[attr-defined]
    top.usage = "loopq COMMAND [options]"
    for name, command in sorted(COMMANDS, key=lambda entry: entry[1].order):
        sub = subs.add_parser(name, help=command.help, description=command.help, epilog=command.epilog)
        command.add(sub)
        sub.usage = _usage(sub)
        sub.add_help_options()
        sub.set_defaults(run=command.run, command=command, parser=sub)
    top.add_argument(
        "--register",
        metavar="FILE",
        action="append",
        default=[],
        help="run this Python file first, which registers model classes or adapters (may be repeated)",
    )
    top.add_argument(
        "--version", action="version", version=f"loopq {loopq.__version__}", help="show the version and exit"
    )
    top.add_help_options()
    return top


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read a command line. An unknown option is an error that names similar ones."""
    args, unknown = parser().parse_known_args(argv)
    if unknown:
        args.parser.error(_unknown(args.parser, unknown[0], sys.argv[1:] if argv is None else list(argv)))
    return args


def _unknown(sub: argparse.ArgumentParser, word: str, argv: list[str]) -> str:
    """Return the message about an unknown argument."""
    new = instead(sub, word, argv[argv.index(word) + 1 :])
    if new is not None:
        return f"there is no {word.partition('=')[0]} any more: {new}"
    options = [option for action in sub._actions for option in action.option_strings]
    old = renamed(sub)
    return f"unknown argument {word}{did_you_mean(word.partition('=')[0], [*options, *old], old)}"


def _usage(sub: argparse.ArgumentParser) -> str:
    """Return the required arguments of a command. The list of options below shows the rest."""
    parts = [sub.prog]
    optional = False
    # Of alternatives the first one is shown.
    groups = [g._group_actions[0] for g in sub._mutually_exclusive_groups if g.required]
    for action in sorted(sub._actions, key=lambda action: bool(action.option_strings)):
        positional = not action.option_strings
        name = action.metavar or (
            f"{{{','.join(action.choices)}}}" if action.choices and positional else action.dest.upper()
        )
        if positional:
            more = f" [{name} ...]" if action.nargs == "+" else ""
            parts.append(f"[{name} ...]" if action.nargs == "*" else f"{name}{more}")
        elif action.required or action in groups:
            parts.append(f"{action.option_strings[0]} {name}")
        else:
            optional = True
    # A percent sign would be read as a format field.
    return " ".join([*map(str, parts), *(["[options]"] if optional else [])]).replace("%", "%%")


def main(argv: Sequence[str] | None = None, patience: float | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 error, 2 wrong usage, 130 interrupted.

    `patience` is the maximum number of seconds from Ctrl-C to the end of the process. None waits for running work.
    """
    # Waiting threads of torch spin and take the cores of a busy machine: rollouts of small models took up to fifteen
    # times as long. Torch reads the variable when it is loaded. It changes no result.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # A closed pipe (`loopq inspect ... | head`) ends the program like any other program.
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    args = parse(argv)
    interrupts = Interrupts(patience, lambda: _left_behind(args))
    try:
        code = _run(args)
    except BaseException as error:
        # A library that is interrupted during import may raise any error.
        interrupts.any |= isinstance(error, KeyboardInterrupt)
        if not interrupts.any:
            raise
    finally:
        interrupts.end()
    if interrupts.any:
        say(_left_behind(args), file=sys.stderr)
        return INTERRUPTED
    return code


def _run(args: argparse.Namespace) -> int:
    """Run the command. An error prints one line."""
    try:
        ranks = Ranks.of_environment()
        if ranks is not None and not args.command.together:
            raise ConfigError(
                f"{ranks.world} processes were started (WORLD_SIZE), and this command is for one: start one, or divide "
                "`loopq collect --hessian` and `loopq solve` (docs/howto/gpus.md)"
            )
        for file in args.register:
            _run_file(Path(file))
        code: int = args.run(args)
        # A disk that is full may only be noticed here.
        sys.stdout.flush()
        return code
    except LoopqError as error:
        wrong = isinstance(error, ConfigError)
        _say(_as_options(args, str(error)) if wrong else str(error))
        return 2 if wrong else 1
    except (MemoryError, RuntimeError) as error:
        # Torch raises a RuntimeError.
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        reason = next(iter(str(error).splitlines()), "")
        _say(
            f"out of memory{': ' * bool(reason)}{reason}; take fewer prompts at once (--batch-size), "
            "shorter ones (--seq-len), or set a limit to keep to (--memory)"
        )
        return 1
    except OSError as error:
        # loopq's own files have their own messages. This handles the rest.
        place = f"{error.filename}: " if error.filename else ""
        _say(f"{place}{error.strerror or error}")
        return 1


def _say(message: str) -> None:
    """Print an error. Very long lines lose their middle. The disk behind the stream may be full too."""
    lines = (x if len(x) < 4 * _LONG else f"{x[:_LONG]} ... {x[-_LONG:]}" for x in message.splitlines())
    message = "\n".join(lines)
    with contextlib.suppress(OSError):
        say(f"loopq: error: {message}", file=sys.stderr, flush=True)


def _as_options(args: argparse.Namespace, message: str) -> str:
    """Replace the settings in a message by the names of their options."""
    # If a setting has several options, the first added one names it.
    actions = [a for a in reversed(args.parser._actions) if a.default is argparse.SUPPRESS]
    options = {a.dest: a.option_strings[0] for a in actions if not isinstance(a, Set)}
    by_set = Set.of(args.parser)
    options |= {} if by_set is None else {n: f"--set {n}" for n in by_set.settings if n not in options}
    if message.partition(" ")[0] not in options:
        return message
    return re.sub(r"^\w+|(?<= goes with )\w+", lambda name: options.get(name[0], name[0]), message)


def _run_file(path: Path) -> None:
    """Run a file as `python FILE` would: modules beside it can be imported."""
    if not path.is_file():
        raise ConfigError(f"--register {path}: no such file; give the path of a Python file")
    sys.path.insert(0, str(path.resolve().parent))
    note_run(path)
    runpy.run_path(str(path))


def _left_behind(args: argparse.Namespace) -> str:
    """Return an interrupted command's message about saved progress."""
    command: Command = args.command
    place = command.keeps(args)
    if place is not None and place.exists():
        return f"loopq: interrupted; progress is saved in {place}: the same command resumes from there"
    return "loopq: interrupted; nothing is saved: the same command starts anew"
