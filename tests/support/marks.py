"""Which cases of a parametrized test are quick, and which of them run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_unless(quick: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """The cases, all but the quick ones with the mark `slow`; a case that is a tuple has several arguments."""
    return [
        case
        if quick(case)
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def running(request: pytest.FixtureRequest, *names: str) -> list[tuple[Any, ...]]:
    """Arguments, without repetition, of the tests that are going to run and use the fixture that asks."""
    users = (
        item for item in request.session.items if request.fixturename in getattr(item, "fixturenames", ())
    )
    here = [
        item.callspec.params for item in users if item.module is request.module and hasattr(item, "callspec")
    ]
    distinct: list[tuple[Any, ...]] = []
    for arguments in (tuple(params[name] for name in names) for params in here):
        distinct += [arguments] if arguments not in distinct else []
    return distinct
