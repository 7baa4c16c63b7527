"""`loopq quantize --dry-run` and `--table` write nothing."""

from __future__ import annotations

import re

import pytest

from tests.support.runs import TINY


def test_dry_run_prints_the_cost_of_the_settings(saved_model, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = list(saved_model.glob("*.safetensors"))
    assert weights
    outputs = []
    for bits in (2, 8):
        code, text, err = command("quantize", saved_model, "--dry-run", "--bits", bits, "--n-prompts", 3)
        assert code == 0, err
        outputs.append(text)
    prompts = [int(re.search(r"over ([\d,]+) tokens", text)[1].replace(",", "")) for text in outputs]
    assert prompts == [3 * 128] * 2
    disk = [re.search(r"disk: checkpoint ([\d.]+ \w+)", text)[1] for text in outputs]
    assert disk[0] != disk[1]
    assert not list(tmp_path.iterdir())
    assert command("quantize", saved_model, "--dry-run", "--memory", "1K")[0] == 2


def test_dry_run_needs_no_weights(saved_model, command, tmp_path):
    (tmp_path / "config.json").write_bytes((saved_model / "config.json").read_bytes())
    assert command("quantize", tmp_path, "--dry-run", "--n-steps", "2,3")[0] == 0


def test_table_prints_a_line_for_each_grid(saved_model, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text, err = command("quantize", saved_model, "--table", "2,4", "--group-size", 16, *TINY)
    assert code == 0, err
    rows = [line.split() for line in text.splitlines()[2:4]]
    assert [row[0] for row in rows] == ["2", "4"]
    assert float(rows[0][4]) > float(rows[1][4]) > 0
    assert err.count("collect") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ([], "one of the arguments --out --dry-run --table is required"),
        (["--table", "2,5"], "argument --table: '2,5': give some of 2, 3, 4, 8"),
        (["--table", "2,2"], "each once"),
        (["--table", "2", "--out", "q"], "not allowed with argument"),
        (["--table", "2", "--fit", "3.0"], "fit chooses the grids"),
    ],
)
def test_errors_are_one_line(saved_model, command, args, match):
    code, _, err = command("quantize", saved_model, *args, *TINY)
    assert code == 2
    assert match in err.splitlines()[-1]
