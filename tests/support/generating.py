"""Generation from several threads at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loopq.errors import ConfigError, SystemContractError
from loopq.runtime.generate import Decoder, Generation, generate
from tests.support.systems import Case, as_loaded, open_system


def generated(case: Case) -> Callable[[int], Any]:
    """Generate with one model, at another depth in each thread."""
    loaded = as_loaded(open_system(case))

    def work(n: int) -> list[int]:
        settings = Generation(n_tokens=3, seed=n)
        try:
            depth = case.depths[n % len(case.depths)]
            return list(generate(loaded, [5, 6, 7], Decoder(loaded.system, depth, settings), settings))
        except (ConfigError, SystemContractError):
            return []

    return work
