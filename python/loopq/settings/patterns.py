"""Patterns on parameter names."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from loopq.errors import ConfigError


def matches(name: str, pattern: str) -> bool:
    """Whether a parameter's name matches a shell pattern, or a regular expression after the prefix "re:"."""
    if pattern.startswith("re:"):
        return re.search(pattern[3:], name) is not None
    return fnmatch.fnmatchcase(name, pattern)


def check_syntax(what: str, patterns: Iterable[str]) -> None:
    """Refuse an invalid regular expression after "re:"."""
    for pattern in patterns:
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as cause:
            raise ConfigError(f"{what} {pattern!r} is no regular expression: {cause}") from cause


def check_patterns(what: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Refuse patterns that match no name.

    Raises
    ------
    ConfigError
        The message gives the pattern and the names. Of many names it has one form each, with N for numbers.
    """
    patterns, known = list(patterns), list(names)
    forms = known if len(known) <= 16 else dict.fromkeys(re.sub(r"\d+", "N", name) for name in known)
    check_syntax(what, patterns)
    for pattern in patterns:
        if not any(matches(name, pattern) for name in known):
            raise ConfigError(
                f"{what} {pattern!r} matches no shared parameter; there are: {', '.join(forms)}"
            )
