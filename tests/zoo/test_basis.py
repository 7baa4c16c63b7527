"""A Llama in another basis: the same function, off the grid that its weights were rounded to, the same bits again."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch import Tensor

from benches.zoo.basis import EMBEDDING, OUTPUT, Draws, pairs, turned
from benches.zoo.lattice import gap

#: Nine heads of queries on three of keys, as SmolLM2 has.
SHAPE = {
    "vocab_size": 48, "hidden_size": 144, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 9,
    "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip


def rounded(weight: Tensor, levels: int = 16) -> Tensor:
    """Round groups of 32 to evenly spaced values, as Q4_1 has them."""
    groups = weight.reshape(-1, 32)
    least = groups.amin(1, keepdim=True)
    step = (groups.amax(1, keepdim=True) - least) / (levels - 1)
    return (((groups - least) / step).round() * step + least).reshape(weight.shape)


@pytest.fixture(scope="module")
def packed() -> dict[str, Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tensors = LlamaForCausalLM(LlamaConfig(**SHAPE)).state_dict()
    tensors.pop("lm_head.weight")
    for name, values in tensors.items():
        if values.dim() == 2 and "layers" in name:
            # Heavier tails than normal numbers have, as trained weights.
            tensors[name] = rounded(torch.randn(values.shape) * torch.rand(values.shape[1]).add(0.2) / 8)
        elif "layers" in name:
            tensors[name] = torch.rand(values.shape) + 0.1
    # Pairs of equal weights, a negative pair, and four channels on their own.
    output = torch.arange(1, SHAPE["hidden_size"] // 2 + 1).repeat_interleave(2) / 8 + 1
    output[:4] = torch.tensor([-3.0, -3.0, 30.0, 40.0])
    output[-2:] = torch.tensor([60.0, 90.0])
    tensors[OUTPUT] = output[torch.randperm(len(output))]
    return {name: values.to(torch.bfloat16) for name, values in tensors.items()}


def logits(tensors: dict[str, Tensor]) -> Tensor:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).double()
    model.load_state_dict({**tensors, "lm_head.weight": tensors[EMBEDDING]})
    with torch.no_grad():
        return model(torch.arange(24).reshape(2, 12)).logits


def test_the_function_stays_up_to_the_rounding_to_bfloat16(packed: dict[str, Tensor]) -> None:
    expected = logits(packed)
    tensors = turned(packed, SHAPE)
    assert float((logits(tensors) - expected).norm() / expected.norm()) < 0.03
    for name, values in tensors.items():
        if values.dim() == 2:
            assert float((values - packed[name]).norm() / packed[name].norm()) > 0.2, name


def test_no_matrix_shows_the_old_grid_and_all_did_before(packed: dict[str, Tensor]) -> None:
    tensors = turned(packed, SHAPE)
    for name, values in packed.items():
        if values.dim() == 2 and "layers" in name:
            assert gap(values.double().numpy()) > 0.5, name
            assert gap(tensors[name].double().numpy()) < 0.05, name


def test_the_same_seed_gives_the_same_bits_on_every_machine() -> None:
    """The digest was taken once; products, square roots and Philox's bits have one result."""
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    rng = Draws(3)
    shapes = {
        EMBEDDING: (8, 8), OUTPUT: (8,), "input_layernorm": (8,), "post_attention_layernorm": (8,),
        "self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8), "self_attn.o_proj": (8, 8),
        "mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12),
    }  # fmt: skip
    tensors = {
        name if name.startswith("model") else f"model.layers.0.{name}.weight": rng.between(
            1, 2, int(np.prod(shape))
        ).reshape(shape)
        for name, shape in shapes.items()
    }
    rotated = turned(tensors, layers)
    bits = b"".join(rotated[name].view(torch.int16).numpy().tobytes() for name in sorted(rotated))
    assert hashlib.sha256(bits).hexdigest()[:16] == "22d2381e94d7c5b9"
    assert not torch.equal(turned(tensors, layers, seed=1)[EMBEDDING], rotated[EMBEDDING])


def test_pairs_are_near_neighbours_of_one_sign() -> None:
    first, second = pairs(torch.tensor([2.0, -1.0, 1.0, 2.02, 1.01, 5.0, 0.9]))
    assert sorted(map(sorted, zip(first.tolist(), second.tolist(), strict=True))) == [[0, 3], [2, 4]]
