"""Tiny models of packages by other people, each with another loop. None has an adapter here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

#: Where `make interop` puts the packages.
FOLDER = Path(__file__).parents[3] / ".cache" / "people"
VOCABULARY, WIDTH = 64, 32
MODELS: dict[str, Callable[[], nn.Module]] = {}


def model(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register what builds the model of a package."""

    def add(build: Callable[[], Any]) -> Callable[[], Any]:
        MODELS[name] = build
        return build

    return add


def made(name: str) -> Any:
    """The model, the same at every call."""
    if str(FOLDER) not in sys.path:
        # Last, so that torch and transformers are the ones of this environment.
        sys.path.append(str(FOLDER))
    torch.manual_seed(0)
    return MODELS[name]().eval()


@model("rlt-pytorch")
def rlt() -> Any:
    """A decoder that runs once for each block of tokens."""
    from RLT import RLT

    return RLT(
        WIDTH, enc_depth=1, dec_depth=1, num_tokens=VOCABULARY, dim_head=8, heads=4, recurrent_block_size=4
    )


@model("spiral-lm")
def spiral() -> Any:
    """A reversible loop with a core under spectral norm."""
    from spiral import SpiralConfig
    from spiral.model import SpiralCore

    config = SpiralConfig(
        vocab_size=VOCABULARY,
        emb_factor=16,
        d_model=WIDTH,
        n_heads=4,
        d_ff=64,
        mean_iters=3,
        max_seq_len=64,
        stability="spectral",
    )
    return SpiralCore(config)


@model("iterative-bert")
def iterative_bert() -> Any:
    """An encoder that gives hidden states."""
    from iterative_bert import IterativeBert, IterativeBertConfig

    config = IterativeBertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_attention_heads=4, intermediate_size=64, h_cycles=2, l_cycles=2,
        max_position_embeddings=64, activation_fn="swiglu", attn_implementation="sdpa",
    )  # fmt: skip
    return IterativeBert(config)


@model("x-transformers: layers_execute_order")
def executed_in_order() -> Any:
    """Layers of one list, in an order with repeats."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=WIDTH, depth=2, heads=4, attn_dim_head=8, layers_execute_order=(0, 1, 2, 3, 2, 3, 2, 3)
    )
    return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=64, attn_layers=layers)


@model("x-transformers: weight_tie_layers")
def tied_layers() -> Any:
    """One layer in all places."""
    from x_transformers import Encoder, TransformerWrapper

    layers = Encoder(
        dim=WIDTH, depth=3, heads=4, attn_dim_head=8, weight_tie_layers=True, rotary_pos_emb=True
    )
    return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=64, attn_layers=layers)


@model("open-mythos")
def open_mythos() -> Any:
    """A looped block of experts that halts token by token."""
    from open_mythos.main import MythosConfig, OpenMythos

    config = MythosConfig(
        vocab_size=VOCABULARY, dim=WIDTH, n_heads=4, n_kv_heads=2, max_seq_len=64, max_loop_iters=3, prelude_layers=1,
        coda_layers=1, attn_type="gqa", act_threshold=2.0, n_experts=4, n_shared_experts=1, n_experts_per_tok=2,
        expert_dim=16, lora_rank=4, qk_rope_head_dim=8,
    )  # fmt: skip
    return OpenMythos(config)


class _Predicts(nn.Module):
    """The first output of a model's `predict`, as many times refined as it likes."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        inputs, packed = self.inner.embed_inputs_with_registers(ids)
        outputs, latents = self.inner.get_initial()
        outputs, _ = self.inner.deep_refinement(inputs, outputs, latents)
        del packed
        logits: torch.Tensor = self.inner.to_pred(outputs)
        return logits


@model("tiny-recursive-model")
def tiny_recursive_model() -> Any:
    """Mixers over tokens of a fixed number, by convolutions of one place."""
    from tiny_recursive_model.mlp_mixer_1d import MLPMixer1D
    from tiny_recursive_model.trm import TinyRecursiveModel

    network = MLPMixer1D(dim=WIDTH, depth=1, seq_len=16)
    return _Predicts(
        TinyRecursiveModel(
            dim=WIDTH,
            num_tokens=VOCABULARY,
            network=network,
            num_refinement_blocks=2,
            num_latent_refinements=2,
        )
    )


@model("bdh-cq")
def bdh() -> Any:
    """One block in all depths, with a projection in three dimensions."""
    from bdh_cq import BDH

    return BDH(dim=WIDTH, num_tokens=VOCABULARY, depth=3, heads=2, dim_qk_heads=64, rotary_dim=8)


@model("recurrent-transformer-pytorch")
def recurrent_transformer() -> Any:
    """Layers that run block after block of tokens."""
    from recurrent_transformer import RecurrentTransformer

    return RecurrentTransformer(
        num_tokens=VOCABULARY, dim=WIDTH, depth=1, dim_head=8, heads=4, recurrent=True, recurrent_mode="naive",
        block_size=4, gate_low_rank=8,
    )  # fmt: skip


@model("log-depth-recurrent-modeling")
def log_depth() -> Any:
    """A cell over a tree of tokens: as many levels as the logarithm of their number."""
    from log_depth_recurrent_modeling import AutoregressiveGatedRecursiveCell

    return AutoregressiveGatedRecursiveCell(num_tokens=VOCABULARY, dim=WIDTH, depth=1)


@model("perceiver-pytorch")
def perceiver() -> Any:
    """Latents that tied layers read again and again."""
    from perceiver_pytorch.perceiver_io import PerceiverLM

    return PerceiverLM(
        dim=WIDTH, num_tokens=VOCABULARY, max_seq_len=64, depth=3, num_latents=8, latent_dim=WIDTH, cross_dim_head=8,
        latent_dim_head=8, latent_heads=4, weight_tie_layers=True,
    )  # fmt: skip
