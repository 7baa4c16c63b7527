"""Settings of small models."""

from __future__ import annotations

from typing import Any

import pytest

from benches.zoo.models import CLASSES
from loopq.errors import ConfigError
from tests.support.systems import small

# Besides the classes' own demands: an odd rotated width, heads that do not divide, a depth that is not there.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("huginn", {"n_embd": 34}, r"n_embd must be a multiple of 4 \(2 \* n_heads\), got 34"),
    ("huginn", {"n_core": 0}, "n_core must be an integer of at least 1, got 0"),
    ("huginn", {"n_coda": -1}, "n_coda must be an integer of at least 0, got -1"),
    ("huginn", {"mean_recurrence": 2.0}, r"mean_recurrence must be an integer of at least 1, got 2\.0"),
    (
        "rllama",
        {"n_heads": 4, "n_kv_heads": 3},
        r"n_heads must be a multiple of 3 \(1 \* n_kv_heads\), got 4",
    ),
    ("nanbeige", {"head_dim": 5}, "head_dim must be a multiple of 2, got 5"),
    ("parcae", {"n_embd": 16}, "n_embd must be an integer of at least 32, got 16"),
    ("ponder", {"rotary_pct": 0.0}, "rotary_dim must be an integer of at least 2, got 0"),
    ("mamba", {"dt_rank": True}, "dt_rank must be an integer of at least 1, got True"),
    ("ouro", {"widht": 3}, r"unknown settings \['widht'\]"),
]


@pytest.mark.parametrize(("kind", "change", "message"), WRONG)
def test_bad_settings_are_refused(kind: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"loopq-zoo-{kind}: {message}"):
        small(kind, **change)()


def test_a_config_of_another_class_is_refused() -> None:
    with pytest.raises(ConfigError, match="model_type 'other', this class is 'loopq-zoo-huginn'"):
        CLASSES["loopq-zoo-huginn"][0].from_dict({"model_type": "other"})
