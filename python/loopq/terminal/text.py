"""Text from outside on a terminal: one function that all output of commands passes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import TextIO

#: What a terminal obeys or hides: control characters but tab and line feed, marks of direction, halves of characters.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: object, *, one_line: bool = False) -> str:
    """Return text with escapes in place of characters that a terminal obeys: codes of colour, position and clipboard.

    Parameters
    ----------
    text : object
        Anything with a text.
    one_line : bool
        Escape line feeds and tabs too. A name from outside could forge lines with them.
    """
    shown = _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))
    return shown.replace("\n", "\\n").replace("\t", "\\t") if one_line else shown


def one_a_line(lines: Iterable[object]) -> str:
    """Return text with these lines and no others."""
    return "\n".join(visible(line, one_line=True) for line in lines)


def say(text: object = "", *, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print text as `visible` shows it."""
    print(visible(text), end=end, file=file or sys.stdout, flush=flush)
