"""Ranks, spectra, overlaps and proxies on matrices with known answers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopq.analysis.diagnosis import rank
from loopq.errors import ConfigError, NonFiniteError
from tests.support.hessians import ArrayHessians
from tests.support.spectra import orthogonal

KNOWN = np.array([1000.0, 500.0, 1.5, 0.9, 1e-2, 1e-4, 0.0, 0.0])


def test_counts_of_a_known_diagonal():
    values = rank.spectrum(np.diag(KNOWN))
    np.testing.assert_allclose(values, KNOWN, atol=1e-12)
    assert [rank.thresholded_rank(values, t) for t in rank.THRESHOLDS] == [2, 2, 3, 4, 4, 5]
    assert rank.stable_rank(values) == pytest.approx(KNOWN.sum() / 1000)


@settings(deadline=None)
@given(st.floats(1e-6, 1e6), st.integers(0, 5))
def test_rank_does_not_change_under_scaling_and_rotation(scale, seed):
    q = orthogonal(len(KNOWN), seed)
    values = rank.spectrum(scale * q @ np.diag(KNOWN) @ q.T)
    assert rank.thresholded_rank(values) == 3
    assert rank.effective_rank(values) == pytest.approx(rank.effective_rank(KNOWN), rel=1e-6)


def test_rank_is_at_most_the_number_of_rows():
    x = np.random.default_rng(0).normal(size=(7, 40))
    values = rank.spectrum(x.T @ x)
    assert rank.thresholded_rank(values, 1e-9) == 7
    assert (values >= 0).all()


def test_flat_spectrum_has_full_effective_and_stable_rank():
    flat = np.full(37, 4.2)
    assert rank.effective_rank(flat) == pytest.approx(37)
    assert rank.stable_rank(flat) == pytest.approx(37)
    assert rank.stable_rank(flat / 100) == pytest.approx(37)
    assert rank.count(np.eye(4) / 10)["stable_rank"] == pytest.approx(4)
    assert rank.effective_rank(np.zeros(3)) == 0.0
    assert rank.stable_rank(np.zeros(3)) == 0.0
    assert rank.thresholded_rank(np.zeros(3)) == 0


def test_gain_is_the_ratio_of_ranks():
    assert rank.rank_gain(12, 4) == 3.0
    assert rank.rank_gain(4, 0) is None


def test_felt_directions_of_a_flat_spectrum():
    felt = rank.felt_directions(np.full(10, 3.0), damping=0.01)
    assert felt["above"] == 10
    assert felt["degrees"] == pytest.approx(10 / 1.01)
    # A spike of 1.8 stable rank in 10,560 directions: 1 % damping acts at 1.7e-6 of the largest.
    spike = np.zeros(10_560)
    spike[:2] = [1.0, 0.8]
    assert rank.felt_directions(spike, 0.01)["relative_mu"] == pytest.approx(1.7e-6, rel=0.01)
    assert rank.felt_directions(7 * spike, 0.10)["relative_mu"] == pytest.approx(1.7e-5, rel=0.01)


def test_felt_directions_at_their_ends():
    # mu is 1: the direction of 1 does not stand out.
    assert rank.felt_directions(np.array([3.0, 1.0]), 0.5)["above"] == 1
    plain = rank.felt_directions(np.array([4.0, 0.5, 0.0, 0.0]), 0.0)
    assert plain == {"above": 2, "degrees": 2.0, "relative_mu": 0.0}
    assert rank.felt_directions(np.zeros(3), 0.01) == {"above": 0, "degrees": 0.0, "relative_mu": 0.0}


def test_layer_survey_of_a_blind_first_step():
    # Step 0 lives in one direction; step 1 and 2 in all of them, equally strong.
    rng = np.random.default_rng(0)
    first = np.outer(rng.normal(size=500), np.eye(16)[0])
    later = [rng.normal(size=(500, 16)) for _ in range(2)]
    ranks = rank.layer_ranks(ArrayHessians.of_rows([first, *later]))
    assert [s["rank"] for s in ranks["per_step"]] == [1, 16, 16]
    assert [s["n_rows"] for s in ranks["per_step"]] == [500, 500, 500]
    assert ranks["first"]["rank"] == 1
    assert ranks["all"]["rank"] == 16
    assert ranks["rank_gain"] == 16.0
    assert ranks["rank_ratio"] == 1 / 16
    traces = [np.sum(x**2) for x in (first, *later)]
    assert ranks["step0_trace_share"] == pytest.approx(traces[0] / sum(traces))
    assert ranks["trace_ratio_0_1"] == pytest.approx(traces[0] / traces[1])
    spectra = rank.layer_spectra(ArrayHessians.of_rows([first, *later]))
    assert spectra["all"]["index"] == list(range(1, 17))
    for key in ("first", "last", "all"):
        for value in ("rank", "trace", "largest", "stable_rank"):
            assert ranks[key][value] == pytest.approx(spectra[key][value], rel=1e-9)


def test_inputs_of_zeros_and_of_one_step_have_no_shares():
    still = rank.layer_ranks(ArrayHessians.of_rows([np.zeros((5, 4))] * 2))
    assert (still["step0_trace_share"], still["trace_ratio_0_1"], still["rank_gain"]) == (None, None, None)
    assert still["all"] == {"rank": 0, "trace": 0.0, "largest": 0.0, "stable_rank": 0.0}
    assert rank.layer_ranks(ArrayHessians.of_rows([np.eye(4)]))["trace_ratio_0_1"] is None
    ended = rank.layer_ranks(ArrayHessians.of_rows([np.eye(4), np.zeros((4, 4))]))
    assert (ended["step0_trace_share"], ended["trace_ratio_0_1"]) == (1.0, None)
    small = rank.layer_ranks(ArrayHessians.of_rows([0.1 * np.eye(4), 0.2 * np.eye(4)]))
    assert small["step0_trace_share"] == pytest.approx(0.2)
    assert small["trace_ratio_0_1"] == pytest.approx(0.25)


def test_first_and_last_step_are_always_counted():
    ranks = rank.layer_ranks(ArrayHessians.of_rows([np.eye(4)] * 4), steps=[])
    assert [s["step"] for s in ranks["per_step"]] == [0, 3]


def test_dominant_step_hides_the_later_ones():
    # The trace share of Ouro's bottleneck (Li, Table 18): later steps have full rank, the sum has rank 1.
    rng = np.random.default_rng(0)
    first = np.outer(rng.normal(size=500), np.eye(16)[0]) * 300
    ranks = rank.layer_ranks(ArrayHessians.of_rows([first, rng.normal(size=(500, 16))]))
    assert ranks["step0_trace_share"] > 0.99
    assert ranks["per_step"][1]["rank"] == 16
    assert ranks["all"]["rank"] == 1
    assert ranks["rank_gain"] == 1.0


def test_blocks_are_measured_separately():
    rng = np.random.default_rng(0)
    x = np.concatenate([1e-3 * rng.normal(size=(200, 8)), np.outer(rng.normal(size=200), np.ones(8))], axis=1)
    ranks = rank.layer_ranks(ArrayHessians.of_rows([x, x]), {"state": slice(0, 8), "embedding": slice(8, 16)})
    # Seen as a whole the state half is below the threshold; on its own it is full.
    assert ranks["first"]["rank"] == 1
    assert ranks["blocks"]["state"]["first"]["rank"] == 8
    assert ranks["blocks"]["embedding"]["first"]["rank"] == 1
    assert ranks["blocks"]["state"]["dim"] == 8


def test_wide_layers_are_counted_at_a_few_steps_only():
    assert rank.steps_to_count(32, 128) == list(range(32))
    assert rank.steps_to_count(32, 10_560) == [0, 1, 4, 8, 16, 31]
    assert rank.steps_to_count(31, 10_560) == [0, 1, 3, 7, 15, 30]
    assert rank.steps_to_count(32, 2048) == list(range(32))
    assert len(rank.steps_to_count(32, 2049)) == 6
    assert rank.steps_to_count(1, 10_560) == [0]


def test_bottleneck_and_largest_gain():
    layers = {
        "a": {"rank_ratio": 0.5, "rank_gain": 1.1},
        "b": {"rank_ratio": 0.01, "rank_gain": 4.0},
        "c": {"rank_ratio": 0.2, "rank_gain": None},
    }
    assert rank.bottleneck(layers) == "b"
    assert rank.largest_gain(layers) == "b"
    assert rank.largest_gain({"c": layers["c"]}) is None
    assert rank.drawn(layers) == ["b"]
    assert rank.drawn(layers, ["d", "a", "c"]) == ["b", "a"]


def test_long_spectra_are_thinned_with_their_ends():
    points = rank.curve(np.linspace(5, 1, 10_000))
    assert len(points["index"]) <= 400
    assert (points["index"][0], points["index"][-1]) == (1, 10_000)
    assert (points["value"][0], points["value"][-1]) == (5.0, 1.0)
    assert rank.curve(np.linspace(5, 1, 400))["index"] == list(range(1, 401))
    assert len(rank.curve(np.linspace(5, 1, 401))["index"]) < 400


def test_damaged_hessian_is_refused():
    h = np.eye(3)
    h[1, 2] = h[2, 2] = np.nan
    with pytest.raises(NonFiniteError, match=r"H\[1, 2\]"):
        rank.spectrum(h)
    with pytest.raises(ConfigError, match="threshold"):
        rank.thresholded_rank(np.ones(3), 1.0)
    with pytest.raises(ConfigError, match="threshold"):
        rank.thresholded_rank(np.ones(3), -0.5)
    assert rank.thresholded_rank(np.array([2.0, 1.0, 0.0]), 0.0) == 2


def test_marchenko_pastur_bulk_explains_the_papers_sweep():
    # Pure noise next to one huge direction: the number of noise eigenvalues above a threshold is set by
    # rows and width alone, here checked against the law's own count.
    rng = np.random.default_rng(0)
    d, n, top = 200, 400, 3000.0
    x = rng.normal(size=(n, d))
    x[:, 0] *= np.sqrt(top * n) / np.linalg.norm(x[:, 0])
    values = rank.spectrum(x.T @ x / n)
    edge = (1 - np.sqrt(d / n)) ** 2
    assert rank.thresholded_rank(values, 0.5 * edge / top) == d
    assert rank.thresholded_rank(values, 2 * (1 + np.sqrt(d / n)) ** 2 / top) == 1
