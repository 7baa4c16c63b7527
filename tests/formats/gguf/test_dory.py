"""Dory as GGUF: names and keys of llama.cpp's converter, and the logits that its loader's graph makes of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loopq
from loopq.errors import CheckpointError
from loopq.formats.gguf.dory import DoryShape
from loopq.formats.gguf.shape import Shape
from loopq.storage.files import read_json
from tests.support.vendors import dory, logits, tokens

gguf = pytest.importorskip("gguf", reason="NOT RUN: gguf is not installed")


def _unit(x: Any) -> Any:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


class Graph:
    """The graph of llama.cpp's `src/models/dory.cpp`, from the file alone, in float64."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.keys = {n.removeprefix("dory."): f.contents() for n, f in reader.fields.items()}
        self.weights = {
            t.name: np.float64(gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors
        }

    def of(self, block: int, name: str) -> Any:
        return self.weights[f"blk.{block}.{name}.weight"].squeeze()

    def attention(self, x: Any, block: int) -> Any:
        n, head, heads = len(x), self.keys["attention.key_length"], self.keys["attention.head_count"]
        base = self.keys["rope.freq_base_2" if self.keys["rope.profile"][block] == 2 else "rope.freq_base"]
        angle = np.arange(n)[:, None, None] / base ** (np.arange(0, head, 2) / head)
        cos, sin = np.cos(angle), np.sin(angle)

        def turned(name: str) -> Any:
            a, b = np.split((x @ self.of(block, name).T).reshape(n, -1, head), 2, -1)
            return _unit(np.concatenate([a * cos - b * sin, b * cos + a * sin], -1))

        std = self.keys["init_std"]
        q = turned("attn_q") * (self.of(block, "dory_sqk").reshape(heads, head) * head**0.5 / std) ** 2
        times = heads // self.keys["attention.head_count_kv"]
        k = turned("attn_k").repeat(times, 1)
        v = (x @ self.of(block, "attn_v").T).reshape(n, -1, head).repeat(times, 1)
        scores = np.einsum("thd,shd->hts", q, k) / head**0.5
        apart = np.arange(n)[:, None] - np.arange(n)
        window = self.keys["attention.sliding_window"] if self.keys["layer_pattern"][block] == "S" else n
        scores = np.where((apart >= 0) & (apart < window), scores, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hts,shd->thd", share / share.sum(-1, keepdims=True), v).reshape(n, -1)
        gate = (self.of(block, "dory_s_gate") * self.keys["gate_init"] ** 0.5 / std) ** 2
        out = out / (1 + np.exp(-(x @ self.of(block, "attn_gate").T) * gate))
        return _unit(out) @ self.of(block, "attn_output").T

    def mlp(self, x: Any, block: int) -> Any:
        gate, up = (
            (x @ self.of(block, f"ffn_{name}").T) * self.of(block, f"dory_suv_{name}") * x.shape[1] ** 0.5
            for name in ("gate", "up")
        )
        return _unit(gate / (1 + np.exp(-gate)) * up) @ self.of(block, "ffn_down").T

    def block(self, x: Any, block: int) -> Any:
        out = self.mlp(x, block) if self.keys["layer_pattern"][block] == "-" else self.attention(x, block)
        rate = np.abs(self.of(block, "dory_alpha") * self.keys["alpha_init"] / self.keys["init_std"])
        return _unit(_unit(x) + rate * (_unit(out) - _unit(x)))

    def logits(self, ids: Any) -> Any:
        first, end = (
            self.keys["input_layer_count"],
            self.keys["input_layer_count"] + self.keys["recurrent_layer_count"],
        )
        x = self.weights["token_embd.weight"][ids]
        for block in range(first):
            x = self.block(x, block)
        given = x
        for _ in range(self.keys["recurrent_loop_count"]):
            x = _unit(x + given)
            for block in range(first, end):
                x = self.block(x, block)
            x = _unit(x)
        for block in range(end, len(self.keys["layer_pattern"])):
            x = self.block(x, block)
        scale = self.weights["dory_logit_scale.weight"].squeeze() / self.keys["init_std"]
        return x @ self.weights["output.weight"].T * scale


def test_the_file_gives_our_logits_by_llama_cpps_graph(tmp_path: Path) -> None:
    model = dory(
        hidden_size=64, intermediate_size=96, head_dim=32, num_attention_heads=4, num_key_value_heads=2
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] in ("sqk", "s_gate", "lambda_1", "lambda_2", "logit_scale"):
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            elif parameter.ndim == 2:
                # Nothing is as small as the epsilon of the norms.
                parameter.mul_(8)
        # llama.cpp takes rows of the table as the unit vectors that Dory's are.
        table = model.model.embed_tokens.weight
        table.copy_(torch.nn.functional.normalize(table))
    model.save_pretrained(tmp_path / "m")
    loopq.quantize(tmp_path / "m", tokens(), out=tmp_path / "q", method="rtn", levels="q5_0")
    loopq.export(tmp_path / "q", tmp_path / "m.gguf", "gguf", force=True)
    expected = logits(loopq.load(tmp_path / "q"))[0].double().numpy()
    graph = Graph(tmp_path / "m.gguf")
    assert (graph.keys["layer_pattern"], graph.keys["recurrent_loop_count"]) == ("S-S-S-*-", 3)
    computed = graph.logits(tokens(1)[0])
    assert np.abs(computed - expected).max() < 1e-3 * np.abs(expected).max()
    assert np.abs(graph.logits(tokens(2)[1]) - expected).max() > 0.1 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("backbone.layers.3.mixer.gate_proj.weight", "blk.3.ffn_gate"),
        ("backbone.layers.2.mixer.g_proj.weight", "blk.2.attn_gate"),
        ("backbone.layers.2.attn_alpha", "blk.2.dory_alpha"),
        ("backbone.layers.3.mlp_alpha", "blk.3.dory_alpha"),
        ("backbone.layers.1.lambda_2", "blk.3.dory_alpha"),
        ("model.layers.1.self_attn.gate_proj.weight", "blk.2.attn_gate"),
        ("model.layers.1.mlp.suv_up", "blk.3.dory_suv_up"),
        ("backbone.embeddings.weight", "token_embd"),
    ],
)
def test_names_of_published_files_and_of_transformers(name: str, place: str) -> None:
    assert DoryShape({}).tensors(name) == [f"{place}.weight"]


def test_what_has_no_place_is_refused(tmp_path: Path) -> None:
    dory().save_pretrained(tmp_path)
    config = read_json(tmp_path / "config.json")
    shape = Shape.of(config).check_whole()
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.input_layernorm\.weight': has no place"):
        shape.tensors("model.layers.0.input_layernorm.weight")
    with pytest.raises(CheckpointError, match="n_recurrent_loops is None"):
        Shape.of({**config, "n_recurrent_loops": None}).check_whole()
    with pytest.raises(CheckpointError, match="do not take turns"):
        DoryShape({**config, "layer_types": ["mlp"] * 8}).header()
    yarn = {**config["rope_parameters"], "sliding_attention": {"rope_type": "yarn", "rope_theta": 1e4}}
    with pytest.raises(CheckpointError, match="sliding_attention: rope_type is 'yarn'"):
        Shape.of({**config, "rope_parameters": yarn})
