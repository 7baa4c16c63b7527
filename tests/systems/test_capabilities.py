"""A system has a capability if it defines its members."""

from __future__ import annotations

import pytest

from loopq.models.systems.generic import Generic
from loopq.systems import SYSTEMS
from loopq.systems.capabilities import (
    Builds,
    Continues,
    Describes,
    Discovers,
    Exits,
    FixedLength,
    Marks,
    Programmed,
    ServedByCache,
    marked,
)
from tests.support.looptoys import LinearLoop, LinearSystem

HAVE = {
    Builds: {"coconut", "loopus"},
    Describes: {"coconut", "generic", "looped"},
    Discovers: {"generic"},
    Exits: {"huginn", "loopus", "ouro", "rllama"},
    Marks: {"coconut"},
    Programmed: {"hrm_text", "huginn", "looped", "nanbeige", "ouro", "rllama"},
}
NAMES = [name for name, cls in SYSTEMS if cls.__module__.startswith("loopq.")]


@pytest.mark.parametrize("kind", HAVE, ids=lambda kind: kind.__name__)
def test_the_adapters_that_have_a_capability(kind: type) -> None:
    assert {name for name in NAMES if issubclass(SYSTEMS.get(name), kind)} == HAVE[kind]


def test_properties_are_capabilities_of_one_system() -> None:
    has = {
        kind: {n for n in NAMES if hasattr(SYSTEMS.get(n), of)}
        for kind, of in ((FixedLength, "prompt_length"), (ServedByCache, "served_by_cache"))
    }
    assert has == {FixedLength: {"trm"}, ServedByCache: {"dory"}}


def test_a_plain_system_has_none() -> None:
    system = LinearSystem(LinearLoop())
    assert not [k for k in (*HAVE, Continues, FixedLength, ServedByCache) if isinstance(system, k)]
    assert marked(system, (1, 2)) == [1, 2]
    assert issubclass(Generic, Continues)
