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
from loopq.formats.engines.base import Question, ask
from loopq.layers.transforms import ChannelScale
from loopq.models.restore import load_checkpoint
from loopq.run.export import export, folded
from loopq.systems.base import Batch


def test_export_compares_logits(solved, tmp_path):
    for form in ("native", "compressed-tensors", "gptq", "gptq_v2"):
        done = export(solved, tmp_path / form, form)
        assert (done.n_prompts, done.difference) == (2, 0.0)
        lines = done.lines()
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
        (["--method", "awq", "--format", "gptq_v2"], "AWQ scale does not fold"),
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
    assert done.lines()[-1].startswith("forced: sglang does not run huginn")


IDS = np.random.default_rng(0).integers(4, 60, (4, 16))
AWQ = {"method": "awq", "bits": 4, "group_size": 16, "threads": 1}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A looped Llama with loud channels, and as many heads of v as of o."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        bos_token_id=1, eos_token_id=2, looped_layers=[1, 3, 2],
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(
                torch.randn_like(value).mul(2).exp() if "norm" in name else torch.randn_like(value) / 4
            )
    folder = tmp_path_factory.mktemp("llama") / "m"
    model.save_pretrained(folder)
    return folder


def _logits(checkpoint):
    import torch

    loaded = load_checkpoint(checkpoint)
    return loaded.system.rollout(Batch(torch.from_numpy(IDS), (0, 1, 2, 3)), loaded.system.n_steps).numpy()


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq"])
def test_awq_for_another_format_is_folded_bit_for_bit(llama, tmp_path, form):
    result = loopq.quantize(llama, IDS.tolist(), out=tmp_path / "q", write=form, **AWQ)
    scaled = [x for x in result.layers.values() if isinstance(x.transform, ChannelScale)]
    assert {x.name.rpartition("layers.")[2][2:] for x in scaled} >= {
        "self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.down_proj.weight",
    }  # fmt: skip
    again = read_any(tmp_path / "q")
    assert not any(layer.transform for layer in again.layers.values())
    assert (
        again.layers["model.layers.1.mlp.down_proj.weight"].report["folded_into"]
        == "model.layers.1.mlp.up_proj"
    )
    np.testing.assert_array_equal(_logits(again), _logits(result))
    # Solved for loopq's own format, it gives the same file.
    native = loopq.quantize(llama, IDS.tolist(), out=tmp_path / "own", **AWQ | {"method": "awq-fold"})
    assert any(layer.transform for layer in native.layers.values())
    assert export(tmp_path / "own", tmp_path / "e", form, force=True).difference == 0.0
    assert read_any(tmp_path / "e").digest() == again.digest()


def test_transformers_reads_folded_scales_with_equal_logits(llama, tmp_path):
    pytest.importorskip("compressed_tensors")
    result = loopq.quantize(llama, IDS.tolist(), **AWQ | {"method": "awq-fold"})
    export(result, tmp_path / "q", "compressed-tensors", remote_code=True, force=True, verify=False)
    (reading,) = ask(
        "transformers", [Question(tmp_path / "q", "compressed-tensors", IDS, _logits(result), True)]
    )
    assert reading.same, reading.line()


def test_scales_of_single_layers_are_refused_with_advice(llama, tmp_path):
    result = loopq.quantize(llama, IDS.tolist(), **AWQ)
    with pytest.raises(CheckpointError, match=r"AWQ scale does not fold.*--method awq-fold"):
        export(result, tmp_path / "q", "compressed-tensors")
    assert not (tmp_path / "q").exists()


def test_unlike_steps_of_one_input_are_refused_before_the_run(llama, tmp_path, monkeypatch):
    monkeypatch.setattr("loopq.api.carry_out", lambda *a: pytest.fail("ran"))
    other = loopq.Override("*up_proj*", {"steps": "first"})
    with pytest.raises(
        CheckpointError, match=r"up_proj.weight: reads the input of .*gate_proj.weight with another"
    ):
        loopq.quantize(llama, IDS.tolist(), write="gptq", out=tmp_path / "q", overrides=(other,), **AWQ)


def test_a_checkpoint_without_scales_is_not_touched(solved):
    whole = store.read(solved)
    assert folded(whole) is whole
