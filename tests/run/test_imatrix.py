"""Importance of a run's inputs for llama.cpp."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import benches.zoo.models
import loopq
from benches.zoo.store import save_model
from loopq.calibrate.dump import Dump
from loopq.cli import main
from loopq.errors import DumpError
from loopq.run import imatrix

gguf = pytest.importorskip("gguf", reason="NOT RUN: gguf is not installed")


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ((), "1"),
        (("--hessian",), "all"),
        (("--hessian", "--per-step"), "1"),
        (("--hessian", "--metric", "loop"), "all"),
    ],
)
def test_importance_is_the_diagonal_of_what_an_error_costs(tmp_path, monkeypatch, kind, steps):
    small = {
        "model_type": "loopq-zoo-nanbeige", "vocab_size": 256, "n_embd": 32, "intermediate_size": 48, "n_layers": 1,
        "n_heads": 2, "n_kv_heads": 2, "head_dim": 16, "block_size": 64, "num_loops": 2,
    }  # fmt: skip
    torch.manual_seed(3)
    save_model(benches.zoo.models.build(small), tmp_path / "m")
    few = ("--n-prompts", "3", "--seq-len", "16")
    assert main(["collect", str(tmp_path / "m"), "--out", str(tmp_path / "d"), *few, *kind]) == 0
    # The published class's config.json in the place of the small one's.
    settings = json.dumps({"architectures": ["NanbeigeForCausalLM"], "num_hidden_layers": 1}).encode()
    monkeypatch.setattr(Dump, "side_files", lambda self: {"config.json": settings})
    lines = loopq.export(tmp_path / "d", tmp_path / "i.gguf", "imatrix", steps=steps).lines()
    assert f"importance of 8 layers, steps {steps}" in lines[0]
    tensors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "i.gguf").tensors}
    numbers = [1] if steps == "1" else [0, 1]
    hessians = Dump(tmp_path / "d").accumulator("model.layers.0.mlp.gate_proj.weight", numbers)
    expected = np.diagonal(hessians.matrix(numbers if hessians.per_step else None))
    assert tensors["blk.0.ffn_up.weight.counts"].item() == 3 * 16 * len(numbers)
    if "--metric" in kind:
        files = Dump(tmp_path / "d").sums
        sums = files.gradient_sums(files.metric_file("model.layers.0.mlp.up_proj.weight", numbers))
        plain, graded = np.diagonal(hessians.matrix(None)), np.diagonal(sums.right)
        wanted = plain * np.median(graded / plain) + graded
        expected = wanted * (plain.sum() / wanted.sum())
        assert not np.allclose(expected, plain, rtol=1e-2)
        assert "8 by the loop metric" in lines[0]
    assert np.allclose(tensors["blk.0.ffn_up.weight.in_sum2"], expected, rtol=1e-6)
    # The head, which is called once, has the importance of that call.
    assert tensors["output.weight.counts"].item() == 3 * 16
    assert len(tensors) == 16


def test_a_dump_without_an_observed_layer_is_refused(monkeypatch):
    empty = SimpleNamespace(manifest=SimpleNamespace(parameters=(), input_groups={}))
    monkeypatch.setattr(imatrix, "Dump", lambda folder: empty)
    with pytest.raises(DumpError, match="d: no layer was observed"):
        imatrix.ObservedDump("d")
