"""Tests with the mark `emulation` run the kernels' C++ on the CPU. `make test-emulation` runs them."""

from __future__ import annotations

import pytest

from tests.support.cuda.emulation import compiler


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("emulation") and compiler() is None:
        pytest.skip("NO C++ COMPILER: CUDA kernels are NOT tested here; install g++ or set CXX")
