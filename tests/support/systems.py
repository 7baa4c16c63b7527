"""Tiny models of every registered system: what the conformance suite runs on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import benches.zoo.models
from loopq.models.classes import Findings
from loopq.models.load import LoadedModel, describe, encode_bytes
from loopq.systems import SYSTEMS, find_system
from loopq.systems.base import Batch, LoopedSystem
from tests.support import vendors
from tests.support.experts import routed_loop, unfused_olmoe
from tests.support.recursive import RecursiveModel


@dataclasses.dataclass(frozen=True)
class Case:
    """A tiny model and the prompts that fit it.

    `depths` are those that a rollout is tried at; the first is the model's own. `steps` says whether there is
    a single-step function. A `variant` differs from another case of its system in a setting or in the class only: it
    goes through the checks of `loopq check`, not through tests of what is the same for both.
    """

    system: str
    build: Callable[[], nn.Module]
    depths: tuple[int, ...]
    n_tokens: int = 10
    vocabulary: int = 64
    n_shared: int = 0
    steps: bool = True
    variant: bool = False


def prompts(case: Case, n_prompts: int = 3, seed: int = 0, first: int = 0) -> Batch:
    """Random prompts of a case, numbered from `first` on."""
    generator = torch.Generator().manual_seed(99)
    ids = torch.randint(4, case.vocabulary - 8, (first + n_prompts, case.n_tokens), generator=generator)
    return Batch(ids[first:], tuple(range(first, first + n_prompts)), seed)


def build(case: Case) -> nn.Module:
    """Build the model from seed 0, with vectors moved off their defaults so that none is idle."""
    torch.manual_seed(0)
    model = case.build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def open_system(case: Case) -> LoopedSystem:
    """Build the model of a case and take the adapter that fits it."""
    model = build(case)
    return SYSTEMS.get("generic")(model) if case.system == "generic" else find_system(model)


def as_loaded(system: LoopedSystem, **findings: Any) -> LoadedModel:
    """Put an adapter in the form that the loader returns, with its findings."""
    return LoadedModel(
        model=system.model,
        system=system,
        encode=encode_bytes,
        tokenizer=None,
        config={},
        folder=None,
        side_files={},
        report=describe(system.model, "tiny", "registered", Findings(**findings)),
    )


_SMALL = {"n_embd": 32, "n_heads": 2, "intermediate_size": 48, "block_size": 32}


def small(kind: str, **changes: Any) -> Callable[[], nn.Module]:
    """Return the maker of a tiny untrained model of `benches.zoo.models`."""
    config = {"model_type": f"loopq-zoo-{kind}", **_SMALL, **changes}
    return lambda: benches.zoo.models.build(config)


class HubWrapper(nn.Module):
    """Puts `gpt.` before every name, as LoopFormer's hub class does."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = small("loopformer")()
        self.config = self.gpt.config


def _hrm_text() -> nn.Module:
    pytest.importorskip("transformers", minversion="5.9")
    from transformers import HrmTextConfig, HrmTextForCausalLM

    config = HrmTextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_layers_per_stack=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return HrmTextForCausalLM(config)


def _albert(kind: str = "AlbertModel", **changes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        settings = {
            "vocab_size": 64,
            "embedding_size": 16,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "num_hidden_layers": 4,
            "max_position_embeddings": 32,
        }
        return getattr(transformers, kind)(transformers.AlbertConfig(**{**settings, **changes}))

    return make


def _mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2))


def _zamba() -> nn.Module:
    from transformers import ZambaConfig, ZambaForCausalLM

    config = ZambaConfig(
        vocab_size=64,
        hidden_size=32,
        attention_hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=9,
        num_attention_heads=2,
        num_key_value_heads=2,
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
        n_mamba_heads=2,
        use_mamba_kernels=False,
    )
    return ZambaForCausalLM(config)


def _zamba2() -> nn.Module:
    from transformers import Zamba2Config, Zamba2ForCausalLM

    config = Zamba2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        mamba_d_state=8,
        mamba_headdim=16,
        n_mamba_heads=4,
        mamba_ngroups=1,
        chunk_size=8,
        num_mem_blocks=2,
        adapter_rank=4,
        layers_block_type=["mamba", "hybrid"] * 4,
        use_mamba_kernels=False,
    )
    return Zamba2ForCausalLM(config)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    from loopq.systems.coconut import wrap_gpt2

    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    return wrap_gpt2(GPT2LMHeadModel(config), start_id=61, latent_id=62, end_id=63)


#: The last two layers see four tokens back.
_WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}


def _looped(kind: str, first: int, last: int, times: int, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, bos_token_id=1, eos_token_id=2, looped_layers=[first, last, times], **settings,
        )  # fmt: skip
        model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
        return model

    return make


def _gpt_neox(**changes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

        config = GPTNeoXConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
        )
        config.pondering_steps = 3
        for name, value in changes.items():
            setattr(config, name, value)
        return GPTNeoXForCausalLM(config)

    return make


def loopus_config() -> dict[str, Any]:
    """``config.json`` of a tiny LoopUS around Qwen3."""
    base = {
        "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        "tie_word_embeddings": False, "transformers_version": "4.57.1",
    }  # fmt: skip
    layers = {"encoder_layer_indices": [0], "reasoning_layer_indices": [1, 2], "decoder_layer_indices": [3]}
    return {"model_type": "lds", "base_config_dict": base, "N": 3, "q_threshold": 0.9, **layers}


def _loopus() -> nn.Module:
    from loopq.systems.loopus import build_loopus

    model = build_loopus(loopus_config())
    with torch.no_grad():
        # Untrained the gate keeps almost all of a step.
        model.reasoning.gate.delta_proj.bias.fill_(-2.0)
    return model


CASES: dict[str, Case] = {
    "Huginn": Case("huginn", small("huginn", n_prelude=1, n_coda=1, mean_recurrence=3), (3, 1, 5), n_shared=9),
    "R-Llama": Case(
        "rllama",
        small("rllama", n_heads=4, n_prelude=1, n_coda=1, mean_recurrence=3),
        (3, 1), n_shared=9,
    ),
    "Ouro": Case("ouro", small("ouro", total_ut_steps=3), (3, 1, 4), n_shared=14),
    "Ouro, early exit": Case(
        "ouro",
        small("ouro", total_ut_steps=3, early_exit_threshold=0.5),
        (3,), n_shared=14, variant=True,
    ),
    "Nanbeige": Case("nanbeige", small("nanbeige", n_heads=4, head_dim=12), (2, 3), n_shared=22),
    "Nanbeige, weighted loops": Case(
        "nanbeige",
        small("nanbeige", n_heads=4, head_dim=12, loop_loss_weights=[0.1, 0.2]),
        (3, 2), n_shared=22, variant=True,
    ),
    "IQuest": Case(
        "iquest",
        small("iquest", n_heads=4, loop_num=2, loop_window_size=4),
        (2, 1, 3), n_shared=14, steps=False,
    ),
    "LoopFormer": Case("loopformer", small("loopformer"), (8, 3), n_shared=10),
    "LoopFormer, hub": Case("loopformer", HubWrapper, (8,), n_shared=10, variant=True),
    "Parcae": Case("parcae", small("parcae", n_prelude=1, n_coda=1, mean_recurrence=3), (3, 1), n_shared=13),
    "Ponder": Case("ponder", small("ponder", pondering_steps=3), (4, 1), n_shared=9, variant=True),
    "transformers GPT-NeoX Ponder": Case("ponder", _gpt_neox(), (4, 1, 2), n_shared=9),
    "transformers GPT-NeoX Ponder, scaled": Case(
        "ponder",
        _gpt_neox(scale_embeds=True, mutiply_pondering_steps=True),
        (4, 3), n_shared=9, variant=True,
    ),
    "COCONUT": Case("coconut", small("coconut", vocab_size=64), (5, 1), n_shared=8, variant=True),
    "transformers GPT-2 COCONUT": Case("coconut", _gpt2, (5, 1, 3), n_shared=8),
    "Mamba": Case("mamba", small("mamba"), (1,), n_shared=9, steps=False, variant=True),
    "transformers Mamba": Case("mamba", _mamba, (1,), n_shared=6, steps=False),
    "control": Case("control", small("control"), (1,), n_shared=8, steps=False, variant=True),
    "looped Llama": Case("looped", _looped("Llama", 1, 3, 2), (2, 1, 3), n_shared=28),
    "looped Qwen2, windows": Case("looped", _looped("Qwen2", 0, 4, 2, **_WINDOWS), (2, 1), n_shared=28, variant=True),
    "LoopUS": Case("loopus", _loopus, (3, 1, 4), n_shared=28),
    "looped OLMoE, experts": Case("looped", unfused_olmoe, (2, 1, 3), n_shared=112, variant=True),
    "transformers Dory": Case("dory", vendors.dory, (3, 1, 4), n_shared=32),
    "transformers Inkling-2": Case("inkling", vendors.inkling, (3, 2), n_shared=44, steps=False),
    "transformers HRM-Text": Case("hrm_text", _hrm_text, (2, 1, 3), n_shared=32),
    "transformers ALBERT": Case("albert", _albert(), (4, 2, 6), n_shared=6),
    "transformers ALBERT, head": Case("albert", _albert("AlbertForMaskedLM"), (4,), n_shared=6, variant=True),
    "transformers ALBERT, chunks": Case("albert", _albert(chunk_size_feed_forward=5), (4,), n_shared=6, variant=True),
    "transformers ALBERT, 2 groups": Case(
        "albert", _albert(num_hidden_groups=2), (2, 1), n_shared=12, steps=False, variant=True,
    ),
    "transformers Zamba": Case("zamba", _zamba, (3,), n_shared=7, steps=False),
    "transformers Zamba2": Case("zamba", _zamba2, (2,), n_shared=12, steps=False, variant=True),
    "TRM": Case("trm", lambda: RecursiveModel(two=False), (4, 1), n_shared=8),
    "HRM": Case("trm", lambda: RecursiveModel(two=True), (4,), n_shared=16, variant=True),
    "generic HRM-Text": Case("generic", _hrm_text, (6,), n_shared=32, steps=False),
    "generic, experts": Case(
        "generic",
        lambda: routed_loop(closed=(2,)),
        (3,), n_shared=13, steps=False, variant=True,
    ),
    "generic Zamba": Case("generic", _zamba, (3,), n_shared=7, steps=False, variant=True),
}  # fmt: skip


def rolled_out(system: LoopedSystem, ids: Any, n_steps: int) -> torch.Tensor:
    """Float32 logits (n_tokens, vocabulary) of a rollout without a cache."""
    return system.rollout(Batch(torch.tensor([ids]), (0,), by_token=True), n_steps)[0].float()
