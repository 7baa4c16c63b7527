"""Prompts of the models of a table: each set and each draw has its own."""

from __future__ import annotations

import pytest

from loopq.errors import ConfigError
from loopq.paper.models import Sizes, open_source


def test_no_prompt_is_in_two_sets_or_two_draws(saved_model) -> None:
    source, sizes = open_source(str(saved_model)), Sizes(2, 1, 2, 24)
    draws = [source.prompts(sizes, draw) for draw in (0, 1)]
    sets = [s for d in draws for s in (d.calibration, d.tuning_held_out)] + [draws[0].evaluation]
    assert [len(s.sequences) for s in sets] == [2, 1, 2, 1, 2]
    assert len({prompt.tobytes() for s in sets for prompt in s.sequences}) == 8
    with pytest.raises(ConfigError, match="is beyond its end"):
        source.prompts(sizes, 10_000)
