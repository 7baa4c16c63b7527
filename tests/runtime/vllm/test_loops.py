"""One copy of the weights, and a cache for each call of an attention layer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from loopq.errors import CheckpointError
from tests.support.vllm_parts import Attention

CONFIG = SimpleNamespace(cache_config="cache", quant_config=None)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention(4, 8, 0.25, 2, "own", "kind", quant_config="q", per_layer_sliding_window=6)
        self.mlp = nn.Linear(2, 2)


def test_a_twin_has_an_attention_of_its_own(parts):
    again = parts("loops").again
    layer = Layer()
    twin = again(layer, "layers.7.attn", CONFIG)
    assert type(twin) is Layer
    assert twin.mlp is layer.mlp
    attention = twin.attn
    assert attention is not layer.attn
    assert layer.attn.prefix == "own"
    assert (attention.prefix, attention.num_heads, attention.head_size, attention.num_kv_heads) == (
        "layers.7.attn",
        4,
        8,
        2,
    )
    assert (attention.impl.scale, attention.sliding_window, attention.attn_type, attention.quant_config) == (
        0.25,
        6,
        "kind",
        "q",
    )
    plain = nn.Linear(2, 2)
    assert again(plain, "x", CONFIG) is plain


@pytest.mark.parametrize(
    ("order", "slots"),
    [([0, 1], []), ([0, 1, 0, 1], ["n.5.attn", "n.6.attn"]), ([0, 0, 1, 0], ["n.5.attn", "n.6.attn"])],
)
def test_repeated_layers_have_slots_after_the_first(parts, order, slots):
    layers = nn.ModuleList([Layer(), Layer()])
    blocks = parts("loops").LoopedBlocks(layers, order, "n", 5, CONFIG)
    run = list(blocks)
    assert len(blocks) == len(run) == len(order)
    assert [layer.mlp for layer in run] == [layers[i].mlp for i in order]
    assert [layer is layers[i] for layer, i in zip(run, order, strict=True)] == [
        i not in order[:k] for k, i in enumerate(order)
    ]
    assert [cache.prefix for cache in blocks.caches] == slots
    # Each parameter has a single name.
    assert [name for name, _ in blocks.named_parameters()] == [
        "0.mlp.weight", "0.mlp.bias", "1.mlp.weight", "1.mlp.bias"
    ]  # fmt: skip


def test_an_inner_model_stands_where_its_class_says(parts):
    loops = parts("loops")
    settings = SimpleNamespace(vocab_size=8, hidden_size=4, tie_word_embeddings=False)
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=settings), quant_config=None)

    class Inner(nn.Module):
        def __init__(self, *, vllm_config, prefix):
            super().__init__()
            self.prefix, self.words = prefix, loops.table(vllm_config, 4, prefix)

    class Made(loops.Causal):
        place, kind, table = "body", Inner, "words"

    model = Made(vllm_config=config, prefix="p")
    assert model.inner is model.body
    assert model.body.prefix == "p.body"
    assert model.embedding is model.body.words
    assert loops.table(config, 4, "p").weight.shape == (8, 4)
    assert loops.BY_TOKEN == {"input_ids": 0, "positions": 0, "inputs_embeds": 0}


@pytest.mark.parametrize("method", ["loopq", "gptq", None])
@pytest.mark.parametrize("absent", ["norm.weight", "qkv_proj.v_proj.weight", "mlp.weight", None])
def test_only_native_files_without_a_tensor_are_refused(parts, method, absent):
    model = nn.Module()
    model.quant_config = method and SimpleNamespace(get_name=lambda: method)
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "v_proj"]}
    model.norm, model.qkv_proj, model.mlp = (nn.Linear(2, 2, bias=False) for _ in range(3))
    # A place for codes.
    model.mlp.weight = nn.Parameter(torch.empty(0))
    names = ["norm.weight", "q_proj.weight", "v_proj.weight", "mlp.weight_packed"]
    given = [(name, torch.ones(1)) for name in names if name != (absent or "").removeprefix("qkv_proj.")]
    complete = parts("loops").complete(model, given)
    if method == "loopq" and absent in ("norm.weight", "qkv_proj.v_proj.weight"):
        with pytest.raises(CheckpointError, match=rf"'{absent.removeprefix('qkv_proj.')}' is missing"):
            list(complete)
    else:
        assert list(complete) == given
