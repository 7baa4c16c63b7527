"""Export of a checkpoint: the logits before and after, refusals before the work."""

from __future__ import annotations

import re

import numpy as np
import pytest

import benches.zoo.models  # noqa: F401  registers the classes
import loopq
from loopq.errors import CheckpointError, ConfigError
from loopq.formats import native as store
from loopq.formats.convert import read_any, write_as
from loopq.run.destination import export
from loopq.run.export import folded


def test_export_compares_logits(solved, tmp_path):
    for form in ("native", "compressed-tensors", "gptq", "gptq_v2"):
        done = export(solved, tmp_path / form, form)
        assert (done.n_prompts, done.difference) == (2, 0.0)
        *lines, audience = done.lines()
        assert audience.startswith("for loopq")
        # The embedded model is loopq's alone.
        assert (form != "native") == (lines[-1].endswith("read it: no other engine has the class"))
        lines = lines if form == "native" else lines[:-1]
        assert lines[-1] == "logits of 2 prompts: largest difference 0"
        assert lines[-2] == "read back from disk: 9 layers equal, number by number"


def test_export_says_why_logits_were_not_compared(solved, tmp_path):
    whole = store.read(solved)
    del whole.side_files["config.json"]
    write_as(tmp_path / "bare", whole, "native")
    with pytest.raises(CheckpointError, match=r"opens a model by the model_type in config\.json"):
        export(tmp_path / "bare", tmp_path / "ct", "compressed-tensors")
    done = export(tmp_path / "bare", tmp_path / "ct", "compressed-tensors", force=True)
    assert done.difference is None
    assert any("logits not compared: the checkpoint carries no config.json" in line for line in done.lines())


def test_export_finds_logits_that_differ(solved, tmp_path, monkeypatch):
    values = iter([np.zeros(3), np.ones(3)])
    monkeypatch.setattr("loopq.run.export._run", lambda *a: (None, None, next(values)))
    with pytest.raises(CheckpointError, match="logits differ by 1 from those before"):
        export(solved, tmp_path / "x", "gptq")
    assert not list(tmp_path.glob("*x*")), "what was not verified has no name"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--set", "symmetric=false", "--format", "gptq"], "use the format 'gptq_v2'"),
        (["--group-size", "24", "--format", "compressed-tensors"], "choose what to do with it"),
        (["--group-size", "24", "--format", "compressed-tensors", "--ragged", "keep"], "cannot keep it"),
        (
            ["--layer", "*adapter*=>rotation=hadamard:16", "--format", "gptq"],
            r"transformed input \(1 such layers\)",
        ),
    ],
)
def test_a_format_unfit_for_the_grid_is_refused_before_the_run(
    tiny_folder, tmp_path, capsys, monkeypatch, options, match
):

    from loopq.cli import main

    monkeypatch.setattr(loopq, "quantize", lambda *a, **k: pytest.fail("ran"))
    args = ["quantize", str(tiny_folder), "--out", str(tmp_path / "q"), "--group-size", "-1", *options]
    assert main([*args, "--n-prompts", "2", "--seq-len", "16"]) == 1
    assert re.search(match, capsys.readouterr().err)
    assert not (tmp_path / ".q.work").exists()


def test_what_was_solved_is_kept_where_only_the_export_fails(tiny_folder, tmp_path, capsys, monkeypatch):
    """Another format starts from it: no layer is solved again."""
    from loopq.cli import main
    from loopq.quantizers.rtn import RTN

    args = ["quantize", str(tiny_folder), "--out", str(tmp_path / "q"), "--format", "gptq", "--method", "rtn"]
    more = ["--group-size", "16", "--set", "scale_dtype=float32", "--n-prompts", "2", "--seq-len", "16"]
    assert main([*args, *more]) == 1
    error = capsys.readouterr().err
    assert "cannot hold" in error
    assert f"{tmp_path / '.q.work'}: what was solved is kept here" in error
    assert not (tmp_path / "q").exists()
    monkeypatch.setattr(RTN, "quantize", lambda *a, **k: pytest.fail("solved again"))
    args[args.index("gptq")] = "compressed-tensors"
    assert main([*args, *more]) == 0
    assert len(read_any(tmp_path / "q").layers) == 9
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".q")] == []


def test_engines_are_asked_before_anything_is_written(solved, tmp_path):
    for engine, kind, match in (
        ("vlm", ConfigError, "engine must be one of transformers.*; got 'vlm'"),
        ("llama.cpp", CheckpointError, "llama.cpp reads gguf, not compressed-tensors"),
    ):
        with pytest.raises(kind, match=match):
            loopq.export(solved, tmp_path / "out", "compressed-tensors", engine=engine)
    assert not (tmp_path / "out").exists()
    done = loopq.export(solved, tmp_path / "out", "compressed-tensors", engine="sglang", force=True)
    assert done.difference == 0
    assert done.lines()[-2].startswith("forced: sglang does not run huginn")


def test_a_checkpoint_without_scales_is_not_touched(solved):
    whole = store.read(solved)
    assert folded(whole) is whole
