"""Importance for llama-quantize: diagonals of the Hessian over the loop's steps, or of the loop metric."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import loopq
from loopq.cli import main

gguf = pytest.importorskip("gguf", reason="NOT RUN: gguf is not installed")


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
