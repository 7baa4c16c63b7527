"""A small model of Parcae's kind: elementwise decay and injection, squared ReLU, value embeddings."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopq.errors import ConfigError
from loopq.zoo._layers import (
    RMSNorm,
    causal_attention,
    init_linears,
    merge_heads,
    rope_tables,
    rotate_interleaved,
    row_noise,
    split_heads,
)
from loopq.zoo._model import ZooConfig, ZooModel

GATE_INPUTS = 32


@dataclasses.dataclass
class ParcaeConfig(ZooConfig):
    """Settings of `ZooParcae`; see `ZooConfig` for the common ones.

    Parameters
    ----------
    n_prelude, n_core, n_coda : int
        Blocks before, in and after the loop.
    rope_base : float
        Base of the rotary angles.
    """

    model_type: ClassVar[str] = "loopq-zoo-parcae"
    multiples: ClassVar = (("n_embd", 2, "n_heads"),)
    least: ClassVar = {"n_embd": GATE_INPUTS}

    n_prelude: int = 0
    n_core: int = 2
    n_coda: int = 0
    rope_base: float = 10_000.0


class ParcaeAttention(nn.Module):
    """Causal attention with separate projections, q and k normed after RoPE.

    With a gate, values get ``2 sigmoid(ve_gate(x[..., :32]))`` times the token's value embedding, per head.
    """

    def __init__(self, config: ParcaeConfig, gated: bool) -> None:
        super().__init__()
        d = config.n_embd
        self.n_heads, self.eps = config.n_heads, config.norm_eps
        self.c_q = nn.Linear(d, d, bias=False)
        self.c_k = nn.Linear(d, d, bias=False)
        self.c_v = nn.Linear(d, d, bias=False)
        self.c_proj = nn.Linear(d, d, bias=False)
        self.ve_gate = nn.Linear(GATE_INPUTS, config.n_heads, bias=False) if gated else None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], value_embeds: Tensor | None) -> Tensor:
        q, k = (rotate_interleaved(split_heads(c(x), self.n_heads), *rope) for c in (self.c_q, self.c_k))
        q, k = (F.rms_norm(p, (p.shape[-1],), eps=self.eps) for p in (q, k))
        v = split_heads(self.c_v(x), self.n_heads)
        if self.ve_gate is not None and value_embeds is not None:
            gate = 2 * torch.sigmoid(self.ve_gate(x[..., :GATE_INPUTS]))
            v = v + gate.transpose(1, 2).unsqueeze(-1) * split_heads(value_embeds, self.n_heads)
        out: Tensor = self.c_proj(merge_heads(causal_attention(q, k, v.to(q.dtype))))
        return out


class ParcaeMLP(nn.Module):
    """``proj(0.5 relu(fc(x))^2)``."""

    def __init__(self, config: ParcaeConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(0.5 * F.relu(self.fc(x)).square())
        return out


class ParcaeBlock(nn.Module):
    """``x += attn(norm_1(x)); x += mlp(norm_2(x))``."""

    def __init__(self, config: ParcaeConfig, gated: bool) -> None:
        super().__init__()
        self.norm_1 = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = ParcaeAttention(config, gated)
        self.norm_2 = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = ParcaeMLP(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], value_embeds: Tensor | None) -> Tensor:
        x = x + self.attn(self.norm_1(x), rope, value_embeds)
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class DiagonalInjection(nn.Module):
    """``s exp(-dt exp(A_log)) + dt (e B^T)`` with ``dt = softplus(dt_bias)``; ``B`` is a bare parameter."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        # A decay of sqrt(1/5) per step: dt = 1 and exp(A_log) = ln(5) / 2.
        self.A_log = nn.Parameter(torch.full((dim,), math.log(math.log(5.0) / 2)))
        self.dt_bias = nn.Parameter(torch.full((dim,), math.log(math.e - 1)))
        self.B = nn.Parameter(torch.eye(dim))

    def forward(self, state: Tensor, embeds: Tensor) -> Tensor:
        dt = F.softplus(self.dt_bias)
        decay = torch.exp(-dt * torch.exp(self.A_log))
        return state * decay + dt * (embeds @ self.B.T)


class ZooParcae(ZooModel):
    """Parcae-like looped byte model.

    Notes
    -----
    ``e = ln_prelude(prelude(wte(ids)))``; noise state of std ``sqrt(2 / (5 d))``; a step is the diagonal
    injection and the core blocks; logits are ``lm_head(ln_f(coda(C(s_N))))`` with a tied head. Odd blocks add
    value embeddings of the tokens, so `iterate_one_step` needs the ids: `embed_inputs` keeps those of its
    last call in ``_current_input_ids``.
    """

    config_class = ParcaeConfig
    config: ParcaeConfig

    def __init__(self, config: ParcaeConfig) -> None:
        super().__init__()
        self.config = config
        d = config.n_embd
        names = ("prelude", "core_block", "coda")
        counts = (config.n_prelude, config.n_core, config.n_coda)
        self._first = dict(zip(names, (0, counts[0], counts[0] + counts[1]), strict=True))
        parts: dict[str, nn.Module] = {
            name: nn.ModuleList(
                ParcaeBlock(config, gated=(self._first[name] + i) % 2 == 1) for i in range(count)
            )
            for name, count in zip(names, counts, strict=True)
        }
        gated = [i for i in range(sum(counts)) if i % 2 == 1]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, d),
                "value_embeds": nn.ModuleDict({str(i): nn.Embedding(config.vocab_size, d) for i in gated}),
                **parts,
                "ln_prelude": RMSNorm(d, config.norm_eps),
                "adapter": DiagonalInjection(d),
                "C": nn.Linear(d, d, bias=False),
                "ln_f": RMSNorm(d, config.norm_eps),
            }
        )
        self.lm_head = nn.Linear(d, config.vocab_size, bias=False)
        init_linears(self, config.n_prelude + config.n_core * config.n_steps + config.n_coda)
        nn.init.eye_(self.transformer["C"].weight)
        self.lm_head.weight = self.transformer["wte"].weight
        self._current_input_ids: Tensor | None = None

    def run_blocks(self, name: str, x: Tensor) -> Tensor:
        """Run the blocks called ``name`` on (batch, seq, d) for the current ids."""
        ids = self._current_input_ids
        if ids is None or ids.shape != x.shape[:2]:
            raise ConfigError(
                "parcae: the step needs the ids of its rows: call embed_inputs(input_ids) first"
            )
        rope = rope_tables(x, self.config.n_embd // self.config.n_heads, self.config.rope_base)
        tables = self.transformer["value_embeds"]
        for i, block in enumerate(self.transformer[name]):
            key = str(self._first[name] + i)
            x = block(x, rope, tables[key](ids) if key in tables else None)
        return x

    def embed_inputs(self, input_ids: Tensor) -> Tensor:
        self._current_input_ids = input_ids
        embeds: Tensor = self.transformer["ln_prelude"](
            self.run_blocks("prelude", self.transformer["wte"](input_ids))
        )
        return embeds

    def initialize_state(self, input_embeds: Tensor, seed: int | None = None, first_row: int = 0) -> Tensor:
        """Draw the noise state; with a seed, row ``i`` depends on ``seed`` and ``first_row + i`` only."""
        std = math.sqrt(2.0 / (5.0 * self.config.n_embd))
        if seed is None:
            noise = torch.empty_like(input_embeds)
            return nn.init.trunc_normal_(noise, std=std, a=-3 * std, b=3 * std)
        rows, *shape = input_embeds.shape
        return row_noise(rows, tuple(shape), std, seed, first_row).to(input_embeds)

    def iterate_one_step(
        self, input_embeds: Tensor, input_states: Tensor, step: int = 0, num_steps: int | None = None
    ) -> Tensor:
        return self.run_blocks("core_block", self.transformer["adapter"](input_states, input_embeds))

    def predict_from_latents(self, latents: Tensor) -> Tensor:
        x = self.run_blocks("coda", self.transformer["C"](latents))
        logits: Tensor = self.lm_head(self.transformer["ln_f"](x))
        return logits.float()
