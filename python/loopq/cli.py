"""The command line: `loopq COMMAND`; the commands are in `loopq.commands`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

import loopq
from loopq.commands import COMMANDS
from loopq.errors import ConfigError, LoopqError


def parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog="loopq", description="Quantizer for looped (recurrent-depth) transformers."
    )
    top.add_argument("--version", action="version", version=f"loopq {loopq.__version__}")
    subs = top.add_subparsers(required=True, metavar="COMMAND")
    for name, command in sorted(COMMANDS, key=lambda entry: entry[1].order):
        sub = subs.add_parser(name, help=command.help, description=command.help)
        command.add(sub)
        sub.set_defaults(run=command.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0 done, 1 an error, 2 wrong usage, 130 interrupted."""
    # A closed pipe (`loopq inspect ... | head`) ends the program as it ends any other.
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    args = parser().parse_args(argv)
    try:
        code: int = args.run(args)
        return code
    except LoopqError as error:
        print(f"loopq: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("loopq: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
