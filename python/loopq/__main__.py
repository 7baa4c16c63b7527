"""`python -m loopq`, and the program `loopq`."""

import io
import os
import sys

from loopq.cli import main as run
from loopq.terminal.interrupts import INTERRUPTED

#: Seconds that Ctrl-C may take.
PATIENCE = 0.7


def main() -> int:
    """Repair closed streams and run the command line.

    Returns
    -------
    int
        The exit code, as in `loopq.cli.main`.
    """
    # A closed stream (`2>&-`) leaves its number to the next file, and that file would receive the output.
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = (s or open(n, "w") for n, s in ((1, sys.stdout), (2, sys.stderr)))  # noqa: PTH123, SIM115
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115
    # Names of files and text of models may hold characters that the terminal's encoding does not have. What is no text
    # in the input is refused by the command, as it is in an argument.
    for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stdin, "surrogateescape")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        code = run(patience=PATIENCE)
    except KeyboardInterrupt:
        # Ctrl-C came between the end of a command and the end of its handler.
        code = INTERRUPTED
    if code == INTERRUPTED:
        # The user waits: the exit handlers of modules take longer than the rest.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    try:
        sys.stdout.flush()
    except OSError:
        # Said already. What is left in the buffer would be tried again, and reported, at the very end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code


if __name__ == "__main__":
    sys.exit(main())
