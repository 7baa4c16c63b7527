"""Patterns on parameter names."""

from __future__ import annotations

import pytest

from loopq.errors import ConfigError
from loopq.settings.patterns import check_patterns, matches


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("core.0.fc.weight", True), ("*fc*", True), ("*FC*", False), ("core", False), ("core.[01].*", True),
        ("re:fc", True), ("re:^fc", False),
        (r"re:^core\.\d+\.fc\.weight$", True),
    ],
)  # fmt: skip
def test_shell_patterns_match_whole_names_and_expressions_parts(pattern, found):
    assert matches("core.0.fc.weight", pattern) == found


def test_a_pattern_must_match_something_and_be_one():
    check_patterns("override", ["a*", "re:b$"], ["ab"])
    with pytest.raises(ConfigError, match=r"override 'x\*' matches no shared parameter; there are: a, b"):
        check_patterns("override", ["a", "x*"], ["a", "b"])
    with pytest.raises(ConfigError, match=r"pattern 're:\(' is no regular expression"):
        check_patterns("pattern", ["re:("], ["a"])


def test_many_names_are_listed_by_their_forms():
    names = [f"layers.{i}.{part}" for i in range(30) for part in ("q", "up")]
    with pytest.raises(ConfigError, match=r"there are: layers\.N\.q, layers\.N\.up$"):
        check_patterns("pattern", ["x*"], names)
