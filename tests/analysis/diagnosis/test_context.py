"""Data shared by the sections of a diagnosis."""

from __future__ import annotations

from loopq.analysis.diagnosis.context import Context
from tests.support.diagnosed import QUICK
from tests.support.looptoys import BlindSystem, LinearLoop, LinearSystem, numpy_rounder, tokens


def context(kind, seed=0):
    return Context(
        kind(LinearLoop(width=8)),
        tokens(n_prompts=3, n_tokens=12, seed=seed),
        5,
        QUICK,
        numpy_rounder,
    )


def test_initial_states_count_where_they_are_random_alone():
    assert context(LinearSystem).n_seeds == 2
    assert context(BlindSystem).n_seeds == 1


def test_exposed_layers_and_prompts_come_from_the_settings():
    assert [p.name for p in context(LinearSystem).exposed] == ["adapter.weight"]
    assert context(BlindSystem).exposed == []
    assert len(context(LinearSystem).prompts.sequences) == QUICK.n_prompts


def test_the_digest_is_of_prompts_and_weights():
    assert context(LinearSystem).fingerprint() == context(LinearSystem).fingerprint()
    assert context(LinearSystem).fingerprint() != context(LinearSystem, seed=1).fingerprint()
    other = context(LinearSystem)
    other.system.model.core.weight.data[0, 0] += 1
    assert other.fingerprint() != context(LinearSystem).fingerprint()
