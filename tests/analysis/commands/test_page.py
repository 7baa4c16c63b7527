"""Pages that commands write."""

from __future__ import annotations

import json
import re
import sys

import pytest

import benches.zoo.chains
import benches.zoo.models  # noqa: F401  registers the classes
from loopq.analysis.report.markup import PAGE
from loopq.cli import parser
from loopq.commands.options import check_place
from loopq.errors import ConfigError
from loopq.formats import native as store
from tests.support.evaluated import FEW


@pytest.mark.slow
def test_a_page_after_quantizing(tiny_folder, tmp_path, capsys):
    from loopq.cli import main

    page = tmp_path / "deep" / "page.html"
    args = ["quantize", str(tiny_folder), "--out", str(tmp_path / "q"), "--group-size", "16", "--bits", "3"]
    args += ["--exclude", "*attn.proj*", "--n-prompts", "2", "--seq-len", "16", "--evaluate", "-"]
    assert main([*args, "--html", str(page)]) == 0
    assert f"page: {page}" in capsys.readouterr().out
    text = page.read_text("utf-8")
    whole = store.read(tmp_path / "q")
    done = "<td class=short>3 bits, uneven levels, groups of 16</td><td>gptq-cd</td>"
    assert text.count(done) == len(whole.layers) == 7
    assert "<td class=names>core_block.0.attn.proj, core_block.1.attn.proj</td>" in text
    sections = ["weights", "where", "cost", "loop", "again"]
    assert re.findall(r'<section id="(\w+)">', text) == sections
    # Measured, not what rounding would do: two maps.
    assert text.count("<table class=heat") == 2


def test_a_page_says_what_was_done_and_where_the_error_is(
    saved_model, quantized, tmp_path, command, monkeypatch
):
    """Of a checkpoint and of what was exported from it, without matplotlib."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command("export", quantized, "--out", tmp_path / "e", "--format", "gptq")[0] == 0
    page = tmp_path / "page.html"
    code, text, err = command("evaluate", saved_model, quantized, tmp_path / "e", *FEW, "--html", page)
    assert code == 0, err
    assert text.endswith(f"page: {page}\n")
    shown = page.read_text("utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', shown)[1])
    native, foreign = (data["errors"]["weights"][str(folder)] for folder in (quantized, tmp_path / "e"))
    assert native == foreign
    assert len(native["own"]) == 9
    assert all(len(row) == 3 and 0 < min(row) < max(row) < 1 for row in native["own"].values())
    done = data["weights"][str(quantized)]
    assert {row["name"] for row in done if "bits" in row} == set(native["own"])
    assert all("reason" in row for row in done if "bits" not in row)
    assert re.findall(r'<section id="(\w+)">', shown) == ["weights", "where", "cost"]
    assert shown.count("<circle") == 2


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "--python", "{}:make", "Q", "--html", "{}"],
        ["evaluate", "M", "Q", "--text", "{}", "--html", "{}"],
        ["--register", "{}", "evaluate", "M", "Q", "--html", "{}"],
        ["diagnose", "M", "--calibration", "{}", "--json", "{}"],
        ["diagnose", "M", "--html", "{}", "--json", "{}"],
    ],
    ids=lambda words: " ".join(words),
)
def test_no_output_takes_the_place_of_another_file_of_the_command(tmp_path, words):
    file = tmp_path / "a.py"
    file.write_text(PAGE.decode())
    args = parser().parse_args([word.format(file) for word in words])
    check_place(tmp_path / "another", PAGE, args)
    # Also by another name.
    with pytest.raises(ConfigError, match="stands twice"):
        check_place(tmp_path / "x" / ".." / "a.py", PAGE, args)
