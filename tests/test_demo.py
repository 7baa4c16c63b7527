"""The main claim, on the embedded model: calibration over the trajectory beats one step, and both beat rounding."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loopq import demo
from loopq.cli import main

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def result():
    return demo.run()


def test_trajectory_beats_one_step_beats_rounding(result):
    assert [(g["bits"], g["group_size"]) for g in result["grids"]] == [(4, 32), (3, 32)]
    for grid in result["grids"]:
        rounded, one_step, trajectory, full = grid["variants"]
        assert full["kl"] < 0.6 * trajectory["kl"]
        assert trajectory["kl"] < one_step["kl"] < rounded["kl"]
        # For every seed of the initial states, not only on average.
        for a, b, c, d in zip(*(variant["kl_by_seed"] for variant in grid["variants"]), strict=True):
            assert d < c < b < a
        assert trajectory["agreement"] > rounded["agreement"]
        assert (
            full["n_bytes"]
            == trajectory["n_bytes"]
            == rounded["n_bytes"]
            < 0.3 * result["reference"]["n_bytes"]
        )
    assert len(result["seeds"]) == 3
    assert result["calibration"]["sha256"] != result["evaluation"]["sha256"]


def test_readme_shows_what_the_demo_prints(result):
    rows = re.findall(
        r"^\| (INT\d) g(\d+) \| ([^|]+?) \| \**([\d.]+)\** \| ([\d.]+) % \|", README.read_text("utf-8"), re.M
    )
    shown = {(bits, group, name): (float(kl), float(agreement)) for bits, group, name, kl, agreement in rows}
    made = {
        (f"INT{g['bits']}", str(g["group_size"]), variant["name"]): (
            variant["kl"],
            100 * variant["agreement"],
        )
        for g in result["grids"]
        for variant in g["variants"]
    }
    assert set(shown) == set(made)
    # Another instruction set sums in another order; codes near a tie then differ.
    for key, (kl, agreement) in shown.items():
        assert kl == pytest.approx(made[key][0], rel=0.1), key
        assert agreement == pytest.approx(made[key][1], abs=0.5), key


def test_demo_command(capsys, monkeypatch, result):
    monkeypatch.setattr(demo, "run", lambda **kwargs: result)
    assert main(["demo"]) == 0
    text = capsys.readouterr().out
    for word in (
        "full precision",
        "RTN",
        "GPTQ, one step",
        "GPTQ, trajectory",
        "full solver, loop metric",
        "KL (nats)",
        "bits/byte",
        "bytes",
    ):
        assert word in text
