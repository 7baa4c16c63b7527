"""Runs that are made of several: bits under a budget; all of it on one command line."""

from __future__ import annotations

import json

import loopq
import loopq.formats.native
from loopq.cli import main
from loopq.run.config import QuantConfig

FULL = QuantConfig.of(method="gptq-cd", bits=3, group_size=16, rank_threshold=None)


def test_command_line(tiny_folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(i * i % 9973) for i in range(600)))
    base = ["quantize", str(tiny_folder), "--calibration", str(text), "--n-prompts", "8", "--seq-len", "24",
            "--method", "gptq-cd", "--set", "rank_threshold=none", "--threads", "1"]  # fmt: skip
    extra = ["--metric", "loop", "--inputs", "asymmetric", "--set", "alpha=0.5",
             "--set", "damping_kind=diagonal", "--fit", "13.3",
             "--set", "fit_bits=2,4", "--set", "fit_group_sizes=16"]  # fmt: skip
    assert main([*base, *extra, "--out", str(tmp_path / "q")]) == 0
    said = capsys.readouterr().out
    assert "fit: " in said
    assert "bits, even levels, groups of 16" in said
    kept = json.loads((tmp_path / "q" / "loopq.json").read_text())
    settings = kept["settings"]
    assert settings["allocation"]["asked"]["bits"] == [2, 4]
    report = loopq.formats.native.read(tmp_path / "q").layers["transformer.adapter.weight"].report
    assert (report["metric"], report["inputs"], report["alpha"]) == ("loop", "asymmetric", 0.5)
    assert report["damping_kind"] == "diagonal"
    assert main([*base, "--set", "fit_bits=3", "--out", str(tmp_path / "r")]) == 2
    assert "--set fit_bits goes with --fit" in capsys.readouterr().err
