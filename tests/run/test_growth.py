"""What benches.growth counts: processes that claim pieces of work, one of them lost."""

from __future__ import annotations

import pytest

from benches.growth import LOOPS, STALE, cost, makespan


def test_whoever_is_free_takes_the_next_piece():
    assert makespan([5.0, 1.0, 1.0, 1.0], 2) == 5.0
    assert makespan([1.0, 1.0, 1.0, 5.0], 2) == 6.0
    assert makespan([2.0] * 7, 1) == 14.0


def test_a_lost_piece_is_done_by_another_once_its_claim_is_stale():
    assert makespan([10.0, 10.0], 2, lost_at=5.0) == STALE + 10.0
    # The three that are left take three rounds for eight pieces; the lost one is free after 120 s, in the third.
    assert makespan([100.0] * 8, 4, lost_at=50.0) == 300.0


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_more_processors_solve_faster_until_each_has_one_layer(loop):
    one, eight, many = (cost(loop, n, "gptq").solve for n in (1, 8, 64))
    assert 0.999 * one / 8 <= eight <= one / 7
    assert many >= 0.999 * one / 64
    assert cost(loop, 10_000, "gptq").solve == pytest.approx(
        max(loop.solves("gptq")) * one / sum(loop.solves("gptq"))
    )
