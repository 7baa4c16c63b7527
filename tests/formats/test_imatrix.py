"""Importance for llama-quantize: diagonals of the Hessian over the loop's steps, or of the loop metric."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import benches.zoo.models
import loopq
from benches.zoo.store import save_model
from loopq.calibrate.dump import Dump
from loopq.cli import main

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
    told = json.dumps({"architectures": ["NanbeigeForCausalLM"]}).encode()
    monkeypatch.setattr(Dump, "side_files", lambda self: {"config.json": told})
    lines = loopq.export(tmp_path / "d", tmp_path / "i.gguf", "imatrix", steps=steps).lines()
    assert f"importance of 8 layers, steps {steps}" in lines[0]
    tensors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "i.gguf").tensors}
    numbers = [1] if steps == "1" else [0, 1]
    hessians = Dump(tmp_path / "d").accumulator("model.layers.0.mlp.gate_proj.weight", numbers)
    expected = np.diagonal(hessians.matrix(numbers if hessians.per_step else None))
    assert tensors["blk.0.ffn_up.weight.counts"].item() == 3 * 16 * len(numbers)
    if "--metric" in kind:
        sums = Dump(tmp_path / "d").gradient_sums("model.layers.0.mlp.up_proj.weight", numbers)
        plain, graded = np.diagonal(hessians.matrix(None)), np.diagonal(sums.right)
        wanted = plain * np.median(graded / plain) + graded
        expected = wanted * (plain.sum() / wanted.sum())
        assert not np.allclose(expected, plain, rtol=1e-2)
        assert "8 by the loop metric" in lines[0]
    assert np.allclose(tensors["blk.0.ffn_up.weight.in_sum2"], expected, rtol=1e-6)
    # The head, which is called once, has the importance of that call.
    assert tensors["output.weight.counts"].item() == 3 * 16
    assert len(tensors) == 16


def test_a_loop_that_is_written_out_has_an_entry_for_each_run(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "m")
    texts = tmp_path / "t.jsonl"
    texts.write_text("".join(json.dumps({"input_ids": list(range(k, k + 16))}) + "\n" for k in (3, 40)))
    spec = f"looped:{tmp_path / 'm'}[1:2]x3"
    arguments = ["collect", spec, "--out", str(tmp_path / "d"), "--hessian", "--calibration", str(texts)]
    assert main([*arguments, "--seq-len", "16"]) == 0
    loopq.export(tmp_path / "d", tmp_path / "i.gguf", "imatrix")
    loopq.export(spec, tmp_path / "m.gguf", "gguf")
    found = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "i.gguf").tensors}
    layers = [t.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if t.data.ndim == 2]
    # Every matrix of the file but the embedding has its entry, by its own name.
    assert {f"{name}.{part}" for name in layers[1:] for part in ("in_sum2", "counts")} == set(found)
    assert layers[0] == "token_embd.weight"
    entries = [found[f"blk.{k}.attn_q.weight.in_sum2"] for k in range(5)]
    assert np.array_equal(entries[1], entries[2])
    assert np.array_equal(entries[1], entries[3])
    assert not np.array_equal(entries[0], entries[1])
    assert found["blk.3.attn_q.weight.counts"].item() == 3 * found["blk.4.attn_q.weight.counts"].item() == 96
