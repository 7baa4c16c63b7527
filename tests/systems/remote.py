"""Stand-ins with the module names and call signatures of the published classes that are not on PyPI.

They keep the traps of the originals: noise from the global generator, a random depth unless one is named, exits
before the last loop, logits of the last position only. An adapter that forgets one of them fails here.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopq import zoo
from loopq.zoo._layers import (
    GatedMLP,
    RMSNorm,
    SplitAttention,
    merge_heads,
    rope_tables,
    rotate_half,
    split_heads,
)

_TINY = {"n_embd": 32, "n_heads": 2, "intermediate_size": 48, "block_size": 32, "n_steps": 3}


def _parts(kind: str, **changes: Any) -> Any:
    return zoo.model_class(f"loopq-zoo-{kind}").from_config({**_TINY, **changes})


class Rotary(nn.Module):
    """`rotary_emb(x, position_ids)`, with the frequencies in a buffer that is not saved."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        inv_freq = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids[0].float()[:, None] * self.inv_freq
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class RavenModel(nn.Module):
    """Huginn's published class; `llama=True` is R-Llama's."""

    def __init__(self, llama: bool) -> None:
        super().__init__()
        kind = "rllama" if llama else "huginn"
        model = _parts(kind, n_heads=4, n_prelude=1, n_coda=1)
        self.transformer, self.lm_head = model.transformer, model.lm_head
        self.llama = llama
        self.emb_scale = 1.0 if llama else math.sqrt(32)
        self.config = SimpleNamespace(
            model_type="huginn_raven",
            mean_recurrence=3,
            init_values={"std": math.sqrt(2 / (5 * 32))},
            test_time_noise=0,
        )
        if llama:
            self.rotary_emb = Rotary(8)
        else:
            tables = rope_tables(torch.zeros(1, 32, 8), 8, 10_000.0)
            self.register_buffer("freqs_cis", torch.stack(tables, -1)[None])

    def _rope(self, freqs: Any) -> Any:
        return freqs if self.llama else (freqs[0, ..., 0], freqs[0, ..., 1])

    def forward(
        self,
        input_ids: Tensor,
        input_embeds: Tensor | None = None,
        input_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_steps: Any = None,
        past_key_values: Any = None,
        output_details: Any = None,
        use_cache: bool = False,
        init_scale: float = 1.0,
        **kwargs: Any,
    ) -> SimpleNamespace:
        embeds = self.transformer.wte(input_ids) * self.emb_scale
        positions = torch.arange(input_ids.shape[1])[None]
        freqs = self.rotary_emb(embeds, positions) if self.llama else self.freqs_cis[:, : input_ids.shape[1]]
        block_idx = torch.tensor(-1)
        for block in self.transformer.prelude:
            embeds = block(embeds, self._rope(freqs))
        x, _, _, _, block_idx = self.iterate_forward(
            embeds, input_states, freqs, block_idx, None, past_key_values, num_steps, init_scale
        )
        for block in self.transformer.coda:
            x = block(x, self._rope(freqs))
        logits = self.lm_head(self.transformer.ln_f(x)).float()
        return SimpleNamespace(logits=logits, past_key_values={} if use_cache else None)

    def iterate_forward(
        self,
        embeds: Any,
        states: Any,
        freqs: Any,
        block_idx: Any,
        mask: Any,
        past: Any,
        steps: Any,
        scale: Any,
    ) -> tuple[Any, ...]:
        x = states if states is not None else torch.randn_like(embeds) * scale
        depth = steps if steps is not None else int(torch.randint(1, 6, ()))
        with torch.no_grad():
            for t in range(depth):
                x, block_idx = self.core_block_forward(x, embeds, freqs, mask, past, block_idx, t)
        return (x if self.llama else self.transformer.ln_f(x)), depth, 0, x.detach(), block_idx

    def core_block_forward(
        self, x: Any, embeds: Any, freqs: Any, mask: Any, past: Any, block_idx: Any, step: Any
    ) -> tuple[Tensor, Tensor]:
        x = self.transformer.adapter(torch.cat([x, embeds], -1))
        for block in self.transformer.core_block:
            block_idx = block_idx + 1
            x = block(x, self._rope(freqs))
        return x, block_idx


class LoopLayer(nn.Module):
    """Llama-style layer; `sandwich` adds Ouro's norms on the branches."""

    def __init__(self, sandwich: bool) -> None:
        super().__init__()
        self.self_attn = SplitAttention(32, 4, 2, 12)
        self.mlp = GatedMLP(32, 48)
        self.input_layernorm = RMSNorm(32, 1e-6)
        self.post_attention_layernorm = RMSNorm(32, 1e-6)
        if sandwich:
            self.input_layernorm_2 = RMSNorm(32, 1e-6)
            self.post_attention_layernorm_2 = RMSNorm(32, 1e-6)

    def forward(self, x: Tensor, rope: Any) -> Tensor:
        keep = nn.Identity()
        x = x + getattr(self, "input_layernorm_2", keep)(self.self_attn(self.input_layernorm(x), rope))
        after = getattr(self, "post_attention_layernorm_2", keep)
        return x + after(self.mlp(self.post_attention_layernorm(x)))


class LoopModel(nn.Module):
    """Inner model of Ouro (with a gate) or Nanbeige."""

    def __init__(self, config: SimpleNamespace, gate: bool) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(LoopLayer(gate) for _ in range(2))
        self.norm = RMSNorm(32, 1e-6)
        self.rotary_emb = Rotary(12)
        if gate:
            self.total_ut_steps = config.total_ut_steps
            self.early_exit_gate = nn.Linear(32, 1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> Any:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        rope = self.rotary_emb(x, torch.arange(x.shape[1])[None])
        gated = hasattr(self, "early_exit_gate")
        weights = getattr(self.config, "loop_loss_weights", [])
        loops = self.total_ut_steps if gated else (len(weights) + 1 if weights else self.config.num_loops)
        states, gates = [], []
        for _ in range(loops):
            for layer in self.layers:
                x = layer(x, rope)
            x = self.norm(x)
            states.append(x)
            if gated:
                gates.append(self.early_exit_gate(x))
        out = SimpleNamespace(last_hidden_state=x, past_key_values={} if use_cache in (None, True) else None)
        return (out, states, gates) if gated else out


class OuroForCausalLM(nn.Module):
    """Ouro's published class: logits of the loop that the gate chooses, unless `exit_at_step` says another."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="ouro", total_ut_steps=3, early_exit_threshold=0.5)
        self.model = LoopModel(self.config, gate=True)
        self.lm_head = nn.Linear(32, 64, bias=False)

    def forward(
        self, input_ids: Tensor, use_cache: bool | None = None, exit_at_step: int | None = None
    ) -> SimpleNamespace:
        out, states, gates = self.model(input_ids, use_cache=use_cache)
        if self.config.total_ut_steps != len(states):
            raise AssertionError("config and model disagree on the number of loops")
        if exit_at_step is None:
            exit_at_step = 0 if float(gates[0].sigmoid().mean()) >= 0 else -1
        return SimpleNamespace(logits=self.lm_head(states[exit_at_step]), past_key_values=out.past_key_values)


class NanbeigeForCausalLM(nn.Module):
    """Nanbeige's published class; loop-loss weights, where there are any, set the number of loops."""

    def __init__(self, weights: tuple[float, ...] = ()) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            model_type="nanbeige", num_loops=2, loop_loss_weights=list(weights), skip_loop_final_norm=False
        )
        self.model = LoopModel(self.config, gate=False)
        self.lm_head = nn.Linear(32, 64, bias=False)

    def forward(self, input_ids: Tensor, use_cache: bool | None = None) -> SimpleNamespace:
        out = self.model(input_ids, use_cache=use_cache)
        return SimpleNamespace(
            logits=self.lm_head(out.last_hidden_state), past_key_values=out.past_key_values
        )


class LoopFormerGPT(nn.Module):
    """LoopFormer's published class: logits of the last position unless there are targets."""

    def __init__(self) -> None:
        super().__init__()
        model = _parts("loopformer")
        self.transformer, self.lm_head = model.transformer, model.lm_head
        self.time_embedder, self.dt_embedder = model.time_embedder, model.dt_embedder
        self.config = SimpleNamespace(model_type="loopformer")

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, steps: tuple[float, ...] = (1 / 8,) * 8
    ) -> Any:
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.shape[1]))
        now = torch.zeros(x.shape[0])
        for dt in steps:
            c = self.time_embedder(now) + self.dt_embedder(torch.ones_like(now) * dt)
            x = self.transformer.h(x, c)
            now = now + dt
        x = self.transformer.norm_f(x)
        logits = self.lm_head(x if targets is not None else x[:, -1:])
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss, x


class HubWrapper(nn.Module):
    """Puts `gpt.` before every name, as LoopFormer's hub class does."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = LoopFormerGPT()
        self.config = self.gpt.config


class ParcaeModel(nn.Module):
    """Parcae's published class: depth drawn per sequence unless a pair is given."""

    def __init__(self) -> None:
        super().__init__()
        model = _parts("parcae", n_prelude=1, n_coda=1)
        self.transformer = model.transformer
        self.value_embeds = self.transformer.pop("value_embeds")
        self.lm_head, self.emb_scale = model.lm_head, 1.0
        self.config = SimpleNamespace(
            mean_recurrence=3,
            state_init="like-init",
            init=SimpleNamespace(get_std=lambda name: math.sqrt(2 / (5 * 32))),
        )
        tables = rope_tables(torch.zeros(1, 32, 16), 16, 10_000.0)
        self.register_buffer("freqs_cis", torch.stack(tables, -1)[None])

    def _run(self, name: str, first: int, x: Tensor, freqs: Tensor) -> Tensor:
        rope = (freqs[0, ..., 0], freqs[0, ..., 1])
        for i, block in enumerate(self.transformer[name]):
            given = None
            if str(first + i) in self.value_embeds:
                given = self.value_embeds[str(first + i)](self._current_input_ids)
            x = block(x, rope, given)
        return x

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        return_logits: bool = False,
        num_steps_pair: Any = None,
    ) -> dict[str, Any]:
        freqs = self.freqs_cis[:, : input_ids.shape[1]]
        self._current_input_ids = input_ids
        embeds = self.transformer.ln_prelude(self._run("prelude", 0, self.transformer.wte(input_ids), freqs))
        x, _, _, _ = self.iterate_forward(embeds, freqs, attention_mask, num_steps_pair)
        x = self._run("coda", 3, self.transformer.C(x), freqs)
        logits = self.lm_head(self.transformer.ln_f(x)).float()
        return {"loss": torch.tensor(0.0), "logits": logits if return_logits else None}

    def initialize_state(self, input_embeds: Tensor) -> Tensor:
        return torch.randn_like(input_embeds)

    def iterate_forward(self, embeds: Any, freqs: Any, mask: Any, pair: Any = None) -> tuple[Any, ...]:
        x = before = self.initialize_state(embeds)
        steps = int(torch.randint(1, 6, ())) if pair is None else sum(pair)
        for t in range(steps):
            before = x
            x = self.core_block_forward(x, embeds, freqs, mask, torch.tensor(t), torch.tensor(steps))
        return x, steps, 0, before.detach()

    def core_block_forward(self, x: Any, embeds: Any, freqs: Any, mask: Any, step: Any, total: Any) -> Tensor:
        return self._run("core_block", 1, self.transformer.adapter(x, embeds), freqs)


class CastedLinear(nn.Module):
    """A linear that casts its weight at each call; no `nn.Linear`."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) / n_in**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class PostNormBlock(nn.Module):
    """TRM's block: no norm weights, not causal."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.qkv_proj, self.self_attn.o_proj = CastedLinear(32, 96), CastedLinear(32, 32)
        self.mlp.gate_up_proj, self.mlp.down_proj = CastedLinear(32, 96), CastedLinear(48, 32)

    def forward(self, cos_sin: Any, hidden_states: Tensor) -> Tensor:
        q, k, v = (split_heads(p, 2) for p in self.self_attn.qkv_proj(hidden_states).chunk(3, -1))
        q, k = rotate_half(q, *cos_sin), rotate_half(k, *cos_sin)
        y = self.self_attn.o_proj(merge_heads(F.scaled_dot_product_attention(q, k, v)))
        x = F.rms_norm(hidden_states + y, (32,))
        gate, up = self.mlp.gate_up_proj(x).chunk(2, -1)
        return F.rms_norm(x + self.mlp.down_proj(F.silu(gate) * up), (32,))


class Net(nn.Module):
    """`net(z, injection)`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PostNormBlock() for _ in range(2))

    def forward(self, hidden_states: Tensor, input_injection: Tensor, **kwargs: Any) -> Tensor:
        x = hidden_states + input_injection
        for layer in self.layers:
            x = layer(hidden_states=x, **kwargs)
        return x


@dataclasses.dataclass
class Carry:
    """State between calls of the root forward."""

    z_H: Tensor
    z_L: Tensor
    steps: Tensor
    halted: Tensor


class RecursiveInner(nn.Module):
    """`inner` of TRM; with `two` nets, of HRM."""

    def __init__(self, config: SimpleNamespace, two: bool) -> None:
        super().__init__()
        self.config, self.puzzle_emb_len = config, 0
        self.embed_tokens = nn.Embedding(64, 32)
        self.lm_head, self.q_head = CastedLinear(32, 64), CastedLinear(32, 2)
        self.L_level = Net()
        if two:
            self.H_level = Net()
        tables = rope_tables(torch.zeros(1, config.seq_len, 16), 16, 10_000.0)
        self.register_buffer("tables", torch.stack(tables), persistent=False)
        self.register_buffer("H_init", torch.randn(32))
        self.register_buffer("L_init", torch.randn(32))

    def rotary_emb(self) -> tuple[Tensor, Tensor]:
        return self.tables[0], self.tables[1]

    def _input_embeddings(self, ids: Tensor, puzzle_identifiers: Tensor) -> Tensor:
        return math.sqrt(32) * self.embed_tokens(ids)

    def forward(self, z_H: Tensor, z_L: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        e = self._input_embeddings(batch["inputs"], batch["puzzle_identifiers"])
        upper = getattr(self, "H_level", self.L_level)
        for _ in range(self.config.H_cycles):
            for _ in range(self.config.L_cycles):
                z_L = self.L_level(z_L, z_H + e, cos_sin=self.rotary_emb())
            z_H = upper(z_H, z_L, cos_sin=self.rotary_emb())
        self.q_head(z_H[:, 0])
        return z_H, z_L, self.lm_head(z_H)


class RecursiveModel(nn.Module):
    """Root class of TRM and HRM: a carry comes in and goes out; finished rows start again."""

    def __init__(self, two: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(H_cycles=2, L_cycles=3, halt_max_steps=4, seq_len=10)
        self.inner = RecursiveInner(self.config, two)

    def initial_carry(self, batch: dict[str, Tensor]) -> Carry:
        rows = batch["inputs"].shape[0]
        empty = torch.full((rows, self.config.seq_len, 32), float("nan"), dtype=self.inner.H_init.dtype)
        return Carry(empty, empty, torch.zeros(rows), torch.ones(rows, dtype=torch.bool))

    def forward(self, carry: Carry, batch: dict[str, Tensor]) -> tuple[Carry, dict[str, Tensor]]:
        reset = carry.halted[:, None, None]
        z_H = torch.where(reset, self.inner.H_init, carry.z_H)
        z_L = torch.where(reset, self.inner.L_init, carry.z_L)
        z_H, z_L, logits = self.inner(z_H, z_L, batch)
        steps = torch.where(carry.halted, 0, carry.steps) + 1
        return Carry(z_H, z_L, steps, steps >= self.config.halt_max_steps), {"logits": logits}


CASES: dict[str, dict[str, Any]] = {
    "remote Huginn": {
        "system": "huginn",
        "build": lambda: RavenModel(False),
        "depths": (3, 1),
        "n_shared": 9,
    },
    "remote R-Llama": {
        "system": "rllama",
        "build": lambda: RavenModel(True),
        "depths": (3, 1),
        "n_shared": 9,
    },
    "remote Ouro": {"system": "ouro", "build": OuroForCausalLM, "depths": (3, 1, 4), "n_shared": 14},
    "remote Nanbeige": {"system": "nanbeige", "build": NanbeigeForCausalLM, "depths": (2, 3), "n_shared": 15},
    "remote Nanbeige, weighted": {
        "system": "nanbeige",
        "build": lambda: NanbeigeForCausalLM((0.1, 0.2)),
        "depths": (3, 2),
        "n_shared": 15,
    },
    "remote LoopFormer": {"system": "loopformer", "build": LoopFormerGPT, "depths": (8, 3), "n_shared": 10},
    "remote LoopFormer, hub": {"system": "loopformer", "build": HubWrapper, "depths": (8,), "n_shared": 10},
    "remote Parcae": {"system": "parcae", "build": ParcaeModel, "depths": (3, 1), "n_shared": 13},
    "remote TRM": {"system": "trm", "build": lambda: RecursiveModel(False), "depths": (4, 1), "n_shared": 8},
    "remote HRM": {"system": "trm", "build": lambda: RecursiveModel(True), "depths": (4, 2), "n_shared": 16},
}
