"""Ouro as GGUF: the logits that llama.cpp's graph makes of the file."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import benches.zoo.models
import loopq
from loopq.errors import CheckpointError
from loopq.formats.checkpoint import load_into
from loopq.formats.convert import write_as
from loopq.formats.gguf.shape import Shape
from tests.support.interop import models

gguf = pytest.importorskip("gguf", reason="NOT RUN: gguf is not installed")


def _norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def _logits_by_ouros_graph(path, ids):
    """The graph of llama.cpp's `src/models/ouro.cpp`, from the file alone, in float64."""
    reader = gguf.GGUFReader(path)
    keys = {n.removeprefix("ouro."): f.contents() for n, f in reader.fields.items()}
    all_weights = {t.name: np.float64(gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    n, head = len(ids), keys["attention.key_length"]
    angle = np.arange(n)[:, None, None] / keys["rope.freq_base"] ** (np.arange(0, head, 2) / head)

    def turned(x):
        even, odd = x[..., ::2], x[..., 1::2]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    x = all_weights["token_embd.weight"][ids]
    for block in list(range(keys["block_count"])) * keys["num_loops"]:
        w = {n.split(".")[2]: v for n, v in all_weights.items() if n.startswith(f"blk.{block}.")}
        given = _norm(x, w["attn_norm"])
        q, k, v = ((given @ w[f"attn_{part}"].T).reshape(n, -1, head) for part in "qkv")
        scores = np.einsum("thd,shd->hts", turned(q), turned(k)) / head**0.5
        share = np.exp(np.where(np.tri(n, dtype=bool), scores, -np.inf))
        out = np.einsum("hts,shd->thd", share / share.sum(-1, keepdims=True), v).reshape(n, -1)
        x = x + _norm(out @ w["attn_output"].T, w["post_attention_norm"])
        given = _norm(x, w["ffn_norm"])
        gate = given @ w["ffn_gate"].T
        hidden = gate / (1 + np.exp(-gate)) * (given @ w["ffn_up"].T)
        x = x + _norm(hidden @ w["ffn_down"].T, w["post_ffw_norm"])
        if block == keys["block_count"] - 1:
            x = _norm(x, all_weights["output_norm.weight"])
    return x @ all_weights["output.weight"].T


def test_ouro_has_our_logits_in_llama_cpp_without_an_exit_gate(tmp_path):
    config = {
        "architectures": ["OuroForCausalLM"], "model_type": "ouro", "vocab_size": 96, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "total_ut_steps": 3,
    }  # fmt: skip
    small = {
        "model_type": "loopq-zoo-ouro", "vocab_size": 96, "n_embd": 64, "intermediate_size": 96, "n_layers": 2,
        "n_heads": 2, "block_size": 64, "total_ut_steps": 3,
    }  # fmt: skip
    torch.manual_seed(3)
    model = benches.zoo.models.build(small).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
    checkpoint = models.checkpoint_of(model, config, bits=4, group_size=32)
    write_as(tmp_path / "q", checkpoint, "native")
    lines = loopq.export(tmp_path / "q", tmp_path / "m.gguf", "gguf", force=True).lines()
    assert "ouro, 3 loops, 25 tensors" in lines[0]
    load_into(model, checkpoint)
    ids = np.random.default_rng(0).integers(0, 96, 20)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)[None], exit_at_step=2).logits[0].double().numpy()
    logits = _logits_by_ouros_graph(tmp_path / "m.gguf", ids)
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
    assert any("the exit gate is not in the file" in line for line in lines)
    for wrong in (None, 0, -1, 2.5, float("nan")):
        with pytest.raises(CheckpointError, match=r"total_ut_steps is .*needs a positive int there"):
            Shape.of({**config, "total_ut_steps": wrong}).check_whole()
    with pytest.raises(CheckpointError, match="rms_norm_eps is nan"):
        Shape.of({**config, "rms_norm_eps": float("nan")}).check_whole()
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.input_layernorm_2\.weight': has no place"):
        Shape.of({**config, "architectures": ["NanbeigeForCausalLM"]}).tensors(
            "model.layers.0.input_layernorm_2.weight"
        )
