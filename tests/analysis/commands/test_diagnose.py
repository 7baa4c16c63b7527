"""`loopq diagnose`: a model and a dump, as text, data and page."""

from __future__ import annotations

import json

import pytest

from tests.support.runs import TINY


def test_diagnose_a_model(saved_model, tmp_path, command):
    pytest.importorskip(
        "matplotlib", reason="the page's figures need matplotlib: pip install 'loopq[report]'"
    )
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    args = ("--only", "ranks,ablation", "--html", page, "--json", data, "--n-prompts", 2, "--seq-len", 24)
    code, text, err = command("diagnose", saved_model, *args)
    assert code == 0, err
    assert "transformer.adapter.weight: " in text
    assert "1 of 9 layers feedback-exposed" in text
    # The numbers of the requested sections.
    assert {"ranks", "ablation"} <= set(text.splitlines())
    assert [line for line in text.splitlines() if line.startswith("layers.transformer.adapter.weight ")]
    assert json.loads(data.read_text())["format"] == "loopq-diagnosis"
    html = page.read_text()
    assert html.lstrip().lower().startswith("<!doctype html>")
    assert "<svg" in html
    assert command("diagnose", saved_model, "--only", "pictures")[0] == 2


def test_diagnose_a_dump(saved_model, tmp_path, command):
    dump = tmp_path / "dump"
    assert command("collect", saved_model, "--out", dump, "--hessian", "--per-step", *TINY)[0] == 0
    code, text, _ = command("diagnose", dump)
    assert code == 0
    assert "not available: injection" in text
    assert command("diagnose", dump, "--quick")[0] == 2


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["--html", "{tmp}"], "is a folder; name a file"),
        (["--json", "{empty}/o"], "no folder that can be written to"),
        (["--work", "{empty}/o"], "no folder that can be written to"),
        (["--seeds", "-1"], "argument --seeds: must be at least 0; got -1"),
        (["--seeds", "x"], "argument --seeds: 'x': give a whole number"),
        (["--group-size", "0"], "--group-size must be -1 (per channel) or at least 1; got 0"),
        (["--group-sizes", "0"], "--group-sizes must be -1 (per channel) or at least 1; got 0"),
    ],
)
def test_errors_are_one_line_before_any_work(tmp_path, command, args, match):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    code, out, err = command("diagnose", "nowhere", *(a.format(tmp=tmp_path, empty=empty) for a in args))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert match in err
