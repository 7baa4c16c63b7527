"""Importance for llama-quantize: diagonals of the Hessian over the loop's steps, or of the loop metric."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import loopq
from loopq.cli import main
from loopq.errors import CheckpointError, LoopqError
from loopq.formats.imatrix import Entry, IMatrix, ImportanceOptions

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
    arrays = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "i.gguf").tensors}
    layers = [t.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if t.data.ndim == 2]
    # Every matrix of the file but the embedding has its entry, by its own name.
    assert {f"{name}.{part}" for name in layers[1:] for part in ("in_sum2", "counts")} == set(arrays)
    assert layers[0] == "token_embd.weight"
    entries = [arrays[f"blk.{k}.attn_q.weight.in_sum2"] for k in range(5)]
    assert np.array_equal(entries[1], entries[2])
    assert np.array_equal(entries[1], entries[3])
    assert not np.array_equal(entries[0], entries[1])
    assert (
        arrays["blk.3.attn_q.weight.counts"].item() == 3 * arrays["blk.4.attn_q.weight.counts"].item() == 96
    )


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "max_position_embeddings": 64, "hidden_size": 4,
    "num_hidden_layers": 2, "intermediate_size": 6, "num_attention_heads": 2, "rms_norm_eps": 1e-5,
}  # fmt: skip


class Seen:
    """Observations of two layers; the second by the loop metric."""

    side_files = {"config.json": json.dumps(CONFIG).encode()}  # noqa: RUF012
    calibration = {"source": "a text", "n_prompts": 3, "n_tokens": 96}  # noqa: RUF012

    def entries(self, steps):
        assert steps == "0:2"
        yield Entry("model.layers.0.self_attn.q_proj.weight", np.array([1.0, 2.0, 3.0, 4.0]), 96, False)
        yield Entry("model.layers.1.mlp.down_proj.weight", np.arange(6) / 7, 48, True)


def test_sums_and_counts_are_written_by_llama_cpps_names(tmp_path):
    out = tmp_path / "i.gguf"
    form = IMatrix()
    written = form.write(out, Seen(), ImportanceOptions(steps="0:2"))
    assert written.lines() == [f"{out}: importance of 2 layers, steps 0:2; 1 by the loop metric"]
    assert form.holds(out)
    assert not form.holds(tmp_path)
    entries = {t.name: t.data.tolist() for t in gguf.GGUFReader(out).tensors}
    assert entries == {
        "blk.0.attn_q.weight.in_sum2": [[1.0, 2.0, 3.0, 4.0]],
        "blk.0.attn_q.weight.counts": [[96.0]],
        "blk.1.ffn_down.weight.in_sum2": [np.float32(np.arange(6) / 7).tolist()],
        "blk.1.ffn_down.weight.counts": [[48.0]],
    }
    facts = form.facts(out)
    assert facts.pop("n_bytes") == out.stat().st_size
    assert facts == {
        "format": "imatrix", "architecture": "llama", "datasets": ["a text"], "chunk_count": 3, "chunk_size": 32,
        "layers": [
            {"name": "blk.0.attn_q.weight", "n_columns": 4, "n_rows": 96.0},
            {"name": "blk.1.ffn_down.weight", "n_columns": 6, "n_rows": 48.0},
        ],
    }  # fmt: skip
    (line,) = form.describe(facts | {"n_bytes": 1500})
    for words in ("architecture llama: importance of 2 layers", "3 chunks of 32 tokens", "1.50 kB on disk"):
        assert words in line


def test_a_file_that_is_there_stays_and_another_model_is_refused(tmp_path):
    out = tmp_path / "i.gguf"
    out.write_text("mine")
    with pytest.raises(CheckpointError, match="a file stands there"):
        IMatrix().write(out, Seen(), ImportanceOptions(steps="0:2"))
    assert out.read_text() == "mine"
    other = Seen()
    other.side_files = {"config.json": json.dumps(CONFIG | {"architectures": ["Other"]}).encode()}
    with pytest.raises(LoopqError, match="architectures"):
        IMatrix().write(tmp_path / "j.gguf", other)
    assert not (tmp_path / "j.gguf").exists()
