"""Exports of a model: logits before and after, loading with dequantized weights and with quantized modules."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

import benches.zoo.models  # noqa: F401  registers the classes
import loopq
from benches.zoo import WEIGHTS
from loopq.errors import CheckpointError
from loopq.formats import native as store
from loopq.formats.convert import read_any, write_as
from loopq.formats.quantized_folder import RECORD
from loopq.inference.linear import QuantLinear
from loopq.layers.layer import QuantizedLayer
from loopq.run.export import export
from loopq.storage.files import read_tensors, write_tensors
from loopq.systems.base import Batch


@pytest.fixture
def solved(tiny_folder, tokens, tmp_path):
    out = tmp_path / "q"
    loopq.quantize(tiny_folder, tokens, out=out, method="rtn", bits=4, group_size=16)
    return out


def logits(loaded):
    """Rollout of two prompts."""
    return loaded.system.rollout(Batch(torch.arange(20).reshape(2, 10), prompts=(0, 1)), 3)


def test_export_compares_logits(solved, tmp_path):
    for form in ("native", "compressed-tensors", "gptq", "gptq_v2"):
        done = export(solved, tmp_path / form, form)
        assert (done.n_prompts, done.difference) == (2, 0.0)
        assert done.lines()[-1] == "logits of 2 prompts: largest difference 0"
        assert done.lines()[-2] == "read back from disk: 9 layers equal, number by number"


def test_export_says_why_logits_were_not_compared(solved, tmp_path):
    whole = store.read(solved)
    del whole.side_files["config.json"]
    write_as(tmp_path / "bare", whole, "native")
    done = export(tmp_path / "bare", tmp_path / "ct", "compressed-tensors")
    assert done.difference is None
    assert "logits not compared: the checkpoint carries no config.json" in done.lines()[-1]


def test_export_finds_logits_that_differ(solved, tmp_path, monkeypatch):
    values = iter([np.zeros(3), np.ones(3)])
    monkeypatch.setattr("loopq.run.export._logits", lambda *a: next(values))
    with pytest.raises(CheckpointError, match="logits differ by 1 from those before"):
        export(solved, tmp_path / "x", "gptq")
    assert not list(tmp_path.glob("*x*")), "what was not verified has no name"


def test_load_takes_every_format(solved, tmp_path):
    expected = logits(loopq.load(solved))
    for form in ("compressed-tensors", "gptq"):
        export(solved, tmp_path / form, form)
        assert torch.equal(logits(loopq.load(tmp_path / form)), expected)
        # As another tool would have written it: no record, the tied head left to the model.
        (tmp_path / form / RECORD).unlink()
        assert torch.equal(logits(loopq.load(tmp_path / form)), expected)


def test_load_refuses_tensors_that_the_model_lacks(solved, tmp_path):
    export(solved, tmp_path / "g", "gptq")
    (tmp_path / "g" / RECORD).unlink()
    path = tmp_path / "g" / "model.safetensors"
    tensors = read_tensors(path)
    kept = {n: t for n, t in tensors.items() if n != "transformer.ln_f.weight"}
    write_tensors(path, kept)
    with pytest.raises(CheckpointError, match=r"missing \['transformer\.ln_f\.weight'\]"):
        loopq.load(tmp_path / "g")
    write_tensors(path, tensors | {"more.weight": tensors["transformer.ln_f.weight"]})
    with pytest.raises(CheckpointError, match=r"unexpected \['more\.weight'\]"):
        loopq.load(tmp_path / "g")


def test_quantized_modules_hold_codes_and_give_the_same_logits(solved):
    dense, packed = loopq.load(solved), loopq.load(solved, quantized=True)
    assert packed.report.notes == ()
    modules = dict(packed.model.named_modules())
    whole = store.read(solved)
    for layer in whole.layers.values():
        module = modules[layer.module]
        assert isinstance(module, QuantLinear)
        np.testing.assert_array_equal(module.dequantize().numpy(), layer.dequantize())
    assert torch.allclose(logits(dense), logits(packed), rtol=1e-5, atol=1e-5)
    assert not any(n.endswith("adapter.weight") for n in packed.model.state_dict())


def test_layers_whose_codes_are_kept_are_not_dequantized(solved, monkeypatch):
    def refuse(layer):
        raise AssertionError(f"{layer.name} was dequantized")

    monkeypatch.setattr(QuantizedLayer, "in_model_orientation", refuse)
    loopq.load(solved, quantized=True)
    with pytest.raises(AssertionError, match="was dequantized"):
        loopq.load(solved)


@pytest.mark.parametrize(
    "name", ["huginn", "loopformer", "mamba", "nanbeige", "ouro", "parcae", "ponder", "rllama"]
)
def test_systems_roll_out_models_that_hold_codes(name, tmp_path):
    out = tmp_path / "q"
    folder = "huginn_small" if name == "huginn" else WEIGHTS / f"{name}_small"
    loopq.quantize(folder, out=out, method="rtn", n_prompts=2, seq_len=16, group_size=32)
    dense, packed = loopq.load(out), loopq.load(out, quantized=True)
    batch = Batch(torch.arange(20).reshape(2, 10), prompts=(0, 1))
    n_steps = min(2, dense.system.n_steps)
    with torch.no_grad():
        a, b = dense.system.rollout(batch, n_steps), packed.system.rollout(batch, n_steps)
    assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{"symmetric": False}, {"symmetric": False, "bits": 3, "group_size": -1},
                                      {"rotation": "hadamard:16"}, {"method": "awq", "symmetric": False}])  # fmt: skip
def test_asymmetric_and_transformed_layers_keep_codes(tiny_folder, tokens, tmp_path, settings):
    out = tmp_path / "q"
    loopq.quantize(tiny_folder, tokens, out=out, **{"method": "rtn", "group_size": 16} | settings)
    dense, loaded = loopq.load(out), loopq.load(out, quantized=True)
    assert loaded.report.notes == ()
    modules, whole = dict(loaded.model.named_modules()), store.read(out)
    assert any(layer.zeros is not None or layer.transform is not None for layer in whole.layers.values())
    for layer in whole.layers.values():
        module = modules[layer.module]
        assert isinstance(module, QuantLinear)
        np.testing.assert_array_equal(module.dequantize().numpy(), layer.stored_values())
    torch.testing.assert_close(logits(dense), logits(loaded), rtol=1e-4, atol=1e-4)


def test_command_line(solved, tmp_path, capsys):
    from loopq.cli import main

    assert main(["export", str(solved), "--out", str(tmp_path / "ct"), "--format", "compressed-tensors"]) == 0
    assert "largest difference 0" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "ct"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "compressed-tensors"
    assert main(["export", str(tmp_path / "ct"), "--out", str(tmp_path / "n"), "--format", "native"]) == 0
    whole, again = read_any(solved), read_any(tmp_path / "n")
    assert all(layer.same_as(again.layers[name]) for name, layer in whole.layers.items())
    assert {p.name: p.read_bytes() for p in solved.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "n").iterdir()
    }
    capsys.readouterr()
    assert main(["export", str(solved), "--out", str(tmp_path / "m"), "--format", "marlin"]) == 1
    assert "Marlin holds groups of 128" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--asymmetric", "--format", "gptq"], "use the format 'gptq_v2'"),
        (["--group-size", "24", "--format", "compressed-tensors"], "choose what to do with it"),
        (["--group-size", "24", "--format", "compressed-tensors", "--ragged", "keep"], "cannot keep it"),
        (["--layer", "*mlp*=>group_size=16", "--format", "marlin"], "Marlin holds groups of 128"),
        (["--bits", "3", "--format", "marlin"], "symmetric INT4 alone"),
        (
            ["--layer", "*adapter*=>rotation=hadamard:16", "--format", "gptq"],
            r"transformed input \(1 such layers\)",
        ),
        (["--method", "awq", "--format", "gptq_v2"], "transformed input"),
    ],
)
def test_a_format_that_cannot_hold_the_grid_is_refused_before_the_run(
    tiny_folder, tmp_path, capsys, monkeypatch, options, match
):
    import re

    from loopq.cli import main

    monkeypatch.setattr(loopq, "quantize", lambda *a, **k: pytest.fail("ran"))
    args = ["quantize", str(tiny_folder), "--out", str(tmp_path / "q"), "--group-size", "-1", *options]
    assert main([*args, "--n-prompts", "2", "--seq-len", "16"]) == 1
    assert re.search(match, capsys.readouterr().err)
    assert not (tmp_path / ".q.work").exists()


def test_what_was_solved_is_kept_where_only_the_export_fails(tiny_folder, tmp_path, capsys, monkeypatch):
    """Another format goes on from it: no layer is solved again."""
    from loopq.cli import main
    from loopq.quantizers.rtn import RTN

    args = ["quantize", str(tiny_folder), "--out", str(tmp_path / "q"), "--format", "gptq", "--method", "rtn"]
    more = ["--group-size", "16", "--scale-dtype", "float32", "--n-prompts", "2", "--seq-len", "16"]
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


def test_a_page_after_quantizing(tiny_folder, tmp_path, capsys):
    from loopq.cli import main

    page = tmp_path / "deep" / "page.html"
    args = ["quantize", str(tiny_folder), "--out", str(tmp_path / "q"), "--group-size", "16", "--bits", "3"]
    args += ["--exclude", "*attn.proj*", "--n-prompts", "2", "--seq-len", "16", "--evaluate", "-"]
    assert main([*args, "--html", str(page)]) == 0
    assert f"page: {page}" in capsys.readouterr().out
    text = page.read_text("utf-8")
    whole = store.read(tmp_path / "q")
    assert text.count("<td class=short>INT3, groups of 16</td><td>gptq-cd</td>") == len(whole.layers) == 7
    assert "<td class=names>core_block.0.attn.proj, core_block.1.attn.proj</td>" in text
    sections = ["weights", "where", "cost", "prompts", "loop", "again"]
    assert re.findall(r'<section id="(\w+)">', text) == sections
    # Measured, not what rounding would do: two maps.
    assert text.count("<table class=heat") == 2
