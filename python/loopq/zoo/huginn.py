"""A small model of Huginn's kind: noise state, concat adapter without bypass, sandwich-normed core."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


@dataclasses.dataclass
class HuginnConfig(ZooConfig):
    """Settings of `ZooHuginn`; see `ZooConfig` for the common ones.

    Parameters
    ----------
    n_prelude, n_core, n_coda : int
        Blocks before, in and after the loop.
    rope_base : float
        Base of the rotary angles.
    state_variance : float
        Variance of an entry of the noise state.
    tie_head : bool
        Whether head and embedding are one parameter, as in Huginn; planted variants need them apart.
    """

    model_type: ClassVar[str] = "loopq-zoo-huginn"
    multiples: ClassVar = (("n_embd", 2, "n_heads"),)

    n_prelude: int = 0
    n_core: int = 2
    n_coda: int = 0
    rope_base: float = 10_000.0
    state_variance: float = 0.4
    tie_head: bool = True


class HuginnAttention(nn.Module):
    """Causal attention with fused ``Wqkv`` and interleaved rotary positions."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.Wqkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (split_heads(part, self.n_heads) for part in self.Wqkv(x).chunk(3, -1))
        y = causal_attention(rotate_interleaved(q, *rope), rotate_interleaved(k, *rope), v)
        out: Tensor = self.proj(merge_heads(y))
        return out


class HuginnMLP(nn.Module):
    """Gated MLP with gate and up fused in ``fc``, gate first."""

    def __init__(self, config: ZooConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc(x).chunk(2, -1)
        out: Tensor = self.proj(F.silu(gate) * up)
        return out


class HuginnBlock(nn.Module):
    """``x = norm_2(attn(norm_1(x)) + x);  x = norm_4(mlp(norm_3(x)) + x)``: norms sit on the stream."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.norm_1 = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = HuginnAttention(config)
        self.norm_2 = RMSNorm(config.n_embd, config.norm_eps)
        self.norm_3 = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = HuginnMLP(config)
        self.norm_4 = RMSNorm(config.n_embd, config.norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = self.norm_2(self.attn(self.norm_1(x), rope) + x)
        out: Tensor = self.norm_4(self.mlp(self.norm_3(x)) + x)
        return out


class ZooHuginn(ZooModel):
    """Huginn-like looped byte model.

    Notes
    -----
    ``e = prelude(sqrt(d) wte(ids))``; ``s_0`` is normal noise of variance ``state_variance`` cut at three
    standard deviations; ``s_{t+1} = core(adapter([s_t, e]))`` with the state columns first; logits are
    ``lm_head(ln_f(coda(ln_f(s_N))))`` with the head tied to ``wte``.
    """

    config_class = HuginnConfig
    config: HuginnConfig

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.config = config
        d = config.n_embd
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, d),
                "prelude": nn.ModuleList(HuginnBlock(config) for _ in range(config.n_prelude)),
                "adapter": nn.Linear(2 * d, d, bias=False),
                "core_block": nn.ModuleList(HuginnBlock(config) for _ in range(config.n_core)),
                "coda": nn.ModuleList(HuginnBlock(config) for _ in range(config.n_coda)),
                "ln_f": RMSNorm(d, config.norm_eps),
            }
        )
        self.lm_head = nn.Linear(d, config.vocab_size, bias=False)
        init_linears(self, config.n_prelude + config.n_core * config.n_steps + config.n_coda)
        if config.tie_head:
            self.lm_head.weight = self.transformer["wte"].weight

    def rope(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotary tables for the positions of ``x`` (batch, seq, d)."""
        head = self.config.n_embd // self.config.n_heads
        return rope_tables(x, head, self.config.rope_base)

    def embed_inputs(self, input_ids: Tensor) -> Tensor:
        x = self.transformer["wte"](input_ids) * math.sqrt(self.config.n_embd)
        rope = self.rope(x)
        for block in self.transformer["prelude"]:
            x = block(x, rope)
        return x

    def initialize_state(self, input_embeds: Tensor, seed: int | None = None, first_row: int = 0) -> Tensor:
        """Draw the noise state.

        Parameters
        ----------
        input_embeds : float array (batch, seq, d)
            Gives shape, dtype and device.
        seed : int, optional
            With a seed, row ``i`` depends on ``seed`` and ``first_row + i`` only; without, the global
            generator is used.
        first_row : int
            Index of the batch's first row within the whole set.
        """
        std = math.sqrt(self.config.state_variance)
        if seed is None:
            noise = torch.empty_like(input_embeds)
            return nn.init.trunc_normal_(noise, std=std, a=-3 * std, b=3 * std)
        rows, *shape = input_embeds.shape
        return row_noise(rows, tuple(shape), std, seed, first_row).to(input_embeds)

    def iterate_one_step(
        self, input_embeds: Tensor, input_states: Tensor, step: int = 0, num_steps: int | None = None
    ) -> Tensor:
        x = self.transformer["adapter"](torch.cat((input_states, input_embeds), -1))
        rope = self.rope(x)
        for block in self.transformer["core_block"]:
            x = block(x, rope)
        return x

    def predict_from_latents(self, latents: Tensor) -> Tensor:
        x = self.transformer["ln_f"](latents)
        rope = self.rope(x)
        for block in self.transformer["coda"]:
            x = block(x, rope)
        logits: Tensor = self.lm_head(self.transformer["ln_f"](x))
        return logits.float()
