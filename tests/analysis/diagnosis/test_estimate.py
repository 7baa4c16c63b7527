"""The estimate of a diagnosis, printed before it."""

from __future__ import annotations

import pytest


def test_estimate_is_told_before_the_run(whole):
    diagnosis, notes = whole
    assert "about" in notes.notes[0]
    assert "rollouts" in notes.notes[0]
    estimate = diagnosis["estimate"]
    assert estimate["seconds"] == pytest.approx(sum(p["seconds"] for p in estimate["sections"].values()))
    # 2 prompts, 2 layers and the reference at two settings, and the inputs of gain and trace.
    assert estimate["sections"]["ablation"]["n_prompt_rollouts"] == 2 * 8
    assert estimate["hessian_bytes"] == 8 * 16 * 17 * 5 + 8 * 8 * 9 * 5
    assert {"hessians", "ranks", "ablation", "paired", "unpaired", "groups"} <= set(notes.stages)
    assert {"feedback grouped", "feedback per channel"} <= set(notes.stages)
