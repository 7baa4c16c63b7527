"""Tables that commands print."""

from __future__ import annotations

import pytest

import benches.zoo.chains  # noqa: F401  registers the letter task
from loopq.commands.output import measurement_table, spans


def test_small_divergences_are_not_shown_as_none():
    rows = [{"name": n, "output": "logits", "kl": kl, "agreement": 1.0, "perplexity": 2.0, "bits_per_byte": None}
            for n, kl in (("full precision", 0.0), ("small", 1.234e-6), ("usual", 0.01234))]  # fmt: skip
    lines = measurement_table(rows).splitlines()[2:]
    assert [line.split()[-5 if "full" not in line else 2] for line in lines] == [
        "0.00000",
        "1.23e-06",
        "0.01234",
    ]


@pytest.mark.parametrize(
    ("steps", "text"), [([], "-"), ([0], "0"), ([0, 1, 2], "0-2"), ([1, 3, 4, 7], "1,3-4,7")]
)
def test_spans(steps, text):
    assert spans(steps) == text
