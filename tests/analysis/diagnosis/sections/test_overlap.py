"""Overlap of the spaces that steps fill."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.analysis.diagnosis import rollouts
from loopq.analysis.diagnosis.sections import overlap
from loopq.errors import ConfigError
from tests.support.looptoys import LinearLoop, LinearSystem, tokens
from tests.support.spectra import orthogonal


def test_overlap_of_a_space_with_itself_and_with_its_complement():
    q = orthogonal(20)
    a = q[:, :5] @ np.diag([5.0, 4, 3, 2, 1]) @ q[:, :5].T
    b = q[:, 5:10] @ q[:, 5:10].T
    assert overlap.overlap(a, a, 5) == pytest.approx(1.0)
    assert overlap.overlap(a, b, 5) == pytest.approx(0.0, abs=1e-12)
    assert overlap.overlap(a, a + 1e-3 * b, 5) == pytest.approx(1.0)


def test_spaces_have_at_least_one_and_at_most_all_dimensions():
    a = np.diag([3.0, 2.0, 1.0])
    assert overlap.leading_space(a, 1)[:, 0] == pytest.approx([1, 0, 0])
    assert overlap.overlap(a, a, 3) == pytest.approx(1.0)
    for k in (0, 4):
        with pytest.raises(ConfigError, match=f"between 1 and the dimension 3; got {k}"):
            overlap.leading_space(a, k)
    with pytest.raises(ConfigError, match=r"the same shape; got \(3, 3\) and \(2, 2\)"):
        overlap.overlap(a, a[:2, :2], 1)


def test_moments_of_states_are_summed_over_prompts_and_positions():
    system, data = LinearSystem(LinearLoop()), tokens(n_prompts=3, n_tokens=5)
    moments = overlap.state_moments(system, data, 8, (0, 3), seed=2, batch_size=2)
    assert set(moments) == {0, 3}
    for step, moment in moments.items():
        states = [rollouts.trace(system, batch, 8).states[step].numpy() for batch in data.batches(1, 2)]
        rows = np.concatenate(states).reshape(15, 6)
        np.testing.assert_allclose(moment, rows.T @ rows, rtol=1e-12)


def test_overlap_of_random_spaces_is_chance():
    rng = np.random.default_rng(0)
    d, k = 60, 6
    overlaps = [
        overlap.overlap(*(x.T @ x for x in (rng.normal(size=(k, d)), rng.normal(size=(k, d)))), k)
        for _ in range(200)
    ]
    assert np.mean(overlaps) == pytest.approx(overlap.chance(k, d), rel=0.05)


def test_chance_levels_of_the_paper():
    # The 0.571 %, 0.631 % and 1.25 % of Li, App. O are chance.
    assert round(100 * overlap.chance(32, 5280), 3) == 0.606
    assert round(100 * overlap.chance(64, 5280), 3) == 1.212


def test_subspace_survey_pairs_steps_and_seeds():
    rng = np.random.default_rng(0)

    def noise():
        x = rng.normal(size=(40, 30))
        return x.T @ x

    shared = np.diag([9.0] * 4 + [0.1] * 26)
    survey_rows = overlap.subspace_survey(
        {0: {0: noise(), 7: shared}, 1: {0: noise(), 7: shared}}, ks=(4, 20)
    )
    assert {f["k"] for f in survey_rows} == {4}
    assert {f["k"] for f in overlap.subspace_survey({0: {0: noise(), 7: shared}}, ks=(15, 16))} == {15}
    by = {f["between"]: f["overlap"] for f in survey_rows}
    assert by["seeds 0 and 1, step 7"] == pytest.approx(1.0)
    assert by["seeds 0 and 1, step 0"] < 0.5
    assert len(by) == 4


def test_overlaps_of_the_end_steps_and_the_adapters_output(whole):
    section = whole[0]["sections"]["overlap"]
    assert set(section) == {"overlaps", "output_ratio"}
    assert section["output_ratio"]
