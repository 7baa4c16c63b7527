"""The one list of formats: the same names for every command and in Python; what is refused is refused before a run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import loopq
from loopq.cli import main, parse
from loopq.errors import CheckpointError, ConfigError
from loopq.formats import FORMATS
from loopq.formats.convert import format_names, format_of, read_any
from loopq.storage.folders import own_folder
from loopq.storage.lock import work_folder

PACKAGE = Path(loopq.__file__).parent


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama of three layers on the disk, and prompts for it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    base = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(base / "m")
    return base / "m"


def spec(folder):
    """The model with a loop."""
    return f"looped:{folder}[1:2]x3"


IDS = [list(range(k, k + 16)) for k in (3, 40)]
GRID = {"method": "rtn", "bits": 4, "group_size": 32}


def test_every_command_knows_the_same_names():
    names = format_names()
    assert names == ["native", *sorted(set(FORMATS.names()) - {"native"})]
    for command in (["quantize", "m"], ["export", "q", "--format", "gptq"]):
        actions = parse([*command, "--out", "o"]).parser._actions
        assert [a.choices for a in actions if "--format" in a.option_strings] == [names]
    with pytest.raises(
        ConfigError, match="known: compressed-tensors, gguf, gptq, gptq_v2, imatrix, modelopt"
    ):
        loopq.export("q", "o", "ggml")


def test_no_code_outside_formats_compares_a_name_of_a_format():
    names = set(FORMATS.names())
    for path in PACKAGE.rglob("*.py"):
        if path.parent == PACKAGE / "formats":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Compare):
                constants = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
                named = "format" in ast.unparse(node) and names & {c for c in constants if isinstance(c, str)}
                assert not named, f"{path}: {ast.unparse(node)}"


def test_quantize_writes_a_file_of_llama_cpp(llama, tmp_path, capsys):
    pytest.importorskip("gguf", reason="NOT RUN: gguf is not installed")
    loopq.quantize(spec(llama), IDS, out=tmp_path / "q", outside="q6_k", **GRID)
    loopq.export(tmp_path / "q", tmp_path / "by-way.gguf", "gguf")
    loopq.quantize(spec(llama), IDS, out=tmp_path / "d" / "named.gguf", write="gguf", **GRID)
    by_way = (tmp_path / "by-way.gguf").read_bytes()
    assert (tmp_path / "d" / "named.gguf").read_bytes() == by_way
    prompts = tmp_path / "t.jsonl"
    prompts.write_text("".join(f'{{"input_ids": {ids}}}\n' for ids in IDS))
    args = ["quantize", spec(llama), "--out", str(tmp_path / "d" / "q.gguf"), "--format", "gguf"]
    args += ["--method", "rtn", "--group-size", "32", "--calibration", str(prompts), "--seq-len", "16"]
    assert main([*args, "--evaluate", str(prompts)]) == 0
    printed = capsys.readouterr().out
    assert "equal, number by number" in printed
    assert "KL" in printed
    assert (tmp_path / "d" / "q.gguf").read_bytes() == by_way
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["named.gguf", "q.gguf"]
    assert main(args) == 1
    assert "a file stands there" in capsys.readouterr().err


def test_a_run_killed_after_writing_compares_its_file(llama, tmp_path):
    pytest.importorskip("gguf", reason="NOT RUN: gguf is not installed")
    out = tmp_path / "q.gguf"
    loopq.quantize(spec(llama), IDS, out=out, write="gguf", **GRID)
    own_folder(work_folder(out))
    loopq.quantize(spec(llama), IDS, out=out, write="gguf", **GRID)
    assert [p.name for p in tmp_path.iterdir()] == ["q.gguf"]
    own_folder(work_folder(out))
    with pytest.raises(CheckpointError, match="reads back differently"):
        loopq.quantize(spec(llama), IDS, out=out, write="gguf", **GRID | {"bits": 8})


@pytest.mark.parametrize("form", ["native", "gptq"])
def test_write_takes_a_name(tiny_folder, tmp_path, form):
    result = loopq.quantize(
        tiny_folder, IDS, out=tmp_path / "q", write=form, method="rtn", bits=4, group_size=16
    )
    assert format_of(tmp_path / "q").name == form
    assert all(layer.same_as(result.layers[name]) for name, layer in read_any(tmp_path / "q").layers.items())


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"bits": 3}, "INT3: llama"),
        ({"symmetric": False}, "INT4, asymmetric: llama"),
        ({"group_size": 16}, "groups of 16: a block of Q4_0 is 32 weights"),
        ({"scale_dtype": "float32"}, "GGUF stores scales in float16"),
        ({"rotation": "hadamard:16"}, "for a transformed input"),
        ({"method": "trellis", "bits": 2, "group_size": -1}, "on a trellis"),
    ],
)
def test_gguf_refuses_unfit_settings_before_the_run(llama, tmp_path, monkeypatch, settings, match):
    pytest.importorskip("gguf", reason="NOT RUN: gguf is not installed")
    monkeypatch.setattr("loopq.api._Quantization._prepared", lambda *a: pytest.fail("ran"))
    with pytest.raises(CheckpointError, match=match):
        loopq.quantize(spec(llama), IDS, out=tmp_path / "q.gguf", write="gguf", **GRID | settings)
    assert not list(tmp_path.iterdir())


def test_gguf_refuses_unknown_models_and_sources_before_the_run(tiny_folder, tmp_path, monkeypatch):
    pytest.importorskip("gguf", reason="NOT RUN: gguf is not installed")
    monkeypatch.setattr("loopq.api._Quantization._prepared", lambda *a: pytest.fail("ran"))
    with pytest.raises(CheckpointError, match="architectures"):
        loopq.quantize(tiny_folder, IDS, out=tmp_path / "q.gguf", write="gguf", **GRID)
    with pytest.raises(ConfigError, match="imatrix is written from a calibration dump"):
        loopq.quantize(tiny_folder, IDS, out=tmp_path / "q.gguf", write="imatrix", **GRID)
    with pytest.raises(ConfigError, match="unknown format 'ggml'"):
        loopq.quantize(tiny_folder, IDS, out=tmp_path / "q", write="ggml", **GRID)
