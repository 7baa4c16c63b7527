"""`loopq merge`: parts of a collection, solved together."""

from __future__ import annotations

from tests.support.runs import TINY


def test_collect_solve_merge(saved_model, tmp_path, command):
    dump = tmp_path / "dump"
    code, text, err = command("collect", saved_model, "--out", dump, *TINY)
    assert code == 0
    assert "about 0.6 MiB of rows for 144 tokens" in err
    assert "rows dump of system huginn, 3 steps" in text
    assert command("solve", dump, "--out", tmp_path / "s", "--set", "steps=1:")[0] == 0
    assert "1-2" in command("inspect", tmp_path / "s")[1]
    for seed in (0, 1):
        part = tmp_path / f"part{seed}"
        assert command("collect", saved_model, "--out", part, "--hessian", "--seed", seed, *TINY)[0] == 0
    code, text, _ = command("merge", tmp_path / "part0", tmp_path / "part1", "--out", tmp_path / "both")
    assert code == 0
    assert "12 prompts, 288 tokens from merged" in text
    code, text, _ = command(
        "solve", tmp_path / "both", "--out", tmp_path / "m", "--layer", "*adapter*=>bits=8"
    )
    assert code == 0
    assert "INT8" in text
