"""Threads of NumPy's products."""

from __future__ import annotations

from threadpoolctl import threadpool_info, threadpool_limits

from loopq.gradients.threads import LARGE, OneThread


def test_threads_of_numpy_are_one_where_products_are_small():
    def in_use():
        return {p["num_threads"] for p in threadpool_info() if p["user_api"] == "blas"}

    with threadpool_limits(2, user_api="blas"):
        threads = OneThread()
        with threads.where_small(LARGE - 1):
            assert in_use() == {1}
        with threads.where_small(LARGE):
            assert in_use() == {2}
        assert in_use() == {2}
