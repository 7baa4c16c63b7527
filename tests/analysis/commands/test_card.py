"""`loopq card`: what it refuses before it measures. `tests/analysis/report/test_card.py` has what cards say."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("args", "code", "match"),
    [
        (["{tmp}"], 1, "no checkpoint: neither loopq.json nor config.json"),
        (["{q}", "{tmp}/none"], 2, "none"),
        (["{q}", "{model}", "--seq-len", "3"], 2, "half of a chunk is context"),
    ],
)
def test_errors_are_one_line_and_leave_no_card(saved_model, quantized, tmp_path, command, args, code, match):
    named = {"tmp": tmp_path, "q": quantized, "model": saved_model}
    got, out, err = command("card", *(a.format(**named) for a in args))
    assert (got, out, err.count("\n")) == (code, "", 1)
    assert match in err
    assert not (quantized / "README.md").exists()
