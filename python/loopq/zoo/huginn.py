"""A small model of Huginn's class with the same module names and calls. The embedded model uses it."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopq.errors import ConfigError
from loopq.zoo.config import SmallConfig
from loopq.zoo.layers import (
    RMSNorm,
    causal_attention,
    init_linears,
    merge_heads,
    rotary_table,
    rotate_interleaved,
    split_heads,
)

Rope = tuple[Tensor, Tensor]


@dataclasses.dataclass
class HuginnConfig(SmallConfig):
    """Settings of `SmallHuginn`. `SmallConfig` describes the common ones.

    Parameters
    ----------
    mean_recurrence : int
        Depth ``N`` of a rollout without an explicit depth.
    n_prelude, n_core, n_coda : int
        Blocks before, in and after the loop.
    rope_base : float
        Base of the rotary angles.
    tie_embeddings : bool
        Whether head and embedding share one parameter, as in Huginn.
    """

    model_type: ClassVar[str] = "loopq-zoo-huginn"
    least: ClassVar = {"n_prelude": 0, "n_coda": 0}
    multiples: ClassVar[tuple[tuple[str, int, str | None], ...]] = (("n_embd", 2, "n_heads"),)

    mean_recurrence: int = 8
    n_prelude: int = 0
    n_core: int = 2
    n_coda: int = 0
    rope_base: float = 10_000.0
    tie_embeddings: bool = True

    @property
    def init_values(self) -> dict[str, float]:
        """Standard deviation of the start state before the embedding scale: ``sqrt(2 / (5 d))``."""
        return {"std": math.sqrt(2.0 / (5.0 * self.n_embd))}


class HuginnAttention(nn.Module):
    """Causal attention with fused ``Wqkv`` and interleaved rotary positions."""

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.Wqkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        q, k, v = (split_heads(part, self.n_heads) for part in self.Wqkv(x).chunk(3, -1))
        y = causal_attention(rotate_interleaved(q, *rope), rotate_interleaved(k, *rope), v)
        out: Tensor = self.proj(merge_heads(y))
        return out


class HuginnMLP(nn.Module):
    """Gated MLP. ``fc`` holds gate and up, gate first."""

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc(x).chunk(2, -1)
        out: Tensor = self.proj(F.silu(gate) * up)
        return out


class HuginnBlock(nn.Module):
    """``x = norm_2(attn(norm_1(x)) + x)`` and ``x = norm_4(mlp(norm_3(x)) + x)``. Norms act on the stream."""

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        self.norm_1 = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = HuginnAttention(config)
        self.norm_2 = RMSNorm(config.n_embd, config.norm_eps)
        self.norm_3 = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = HuginnMLP(config)
        self.norm_4 = RMSNorm(config.n_embd, config.norm_eps)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        x = self.norm_2(self.attn(self.norm_1(x), rope) + x)
        out: Tensor = self.norm_4(self.mlp(self.norm_3(x)) + x)
        return out


class SmallHuginn(nn.Module):
    """Huginn's class: prelude, looped adapter and core blocks, coda. It has no cache, padding mask or loss.

    Notes
    -----
    The embedding is ``e = prelude(sqrt(d) wte(ids))``. The start state ``s_0`` is normal noise of variance 2/5, cut at
    three standard deviations. A step is ``s_{t+1} = core(adapter([s_t, e]))`` with the state columns first. The logits
    are ``lm_head(ln_f(coda(ln_f(s_N))))`` with the head tied to ``wte``. As in the published class, noise comes from
    the global generator unless `input_states` is given. A depth given as one number runs without gradient.
    """

    block_class: ClassVar[type[nn.Module]] = HuginnBlock

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.config = config
        d = config.n_embd
        self.emb_scale = math.sqrt(d)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, d),
                "prelude": nn.ModuleList(self.block_class(config) for _ in range(config.n_prelude)),
                "adapter": nn.Linear(2 * d, d, bias=False),
                "core_block": nn.ModuleList(self.block_class(config) for _ in range(config.n_core)),
                "coda": nn.ModuleList(self.block_class(config) for _ in range(config.n_coda)),
                "ln_f": RMSNorm(d, config.norm_eps),
            }
        )
        self.lm_head = nn.Linear(d, config.vocab_size, bias=False)
        init_linears(self, config.n_prelude + config.n_core * config.mean_recurrence + config.n_coda)
        if config.tie_embeddings:
            self.lm_head.weight = self.transformer["wte"].weight
        self.add_rotary(d // config.n_heads)

    def add_rotary(self, head_dim: int) -> None:
        """Store the rotary table ``freqs_cis`` of cosines and sines as (1, block_size, 1, head_dim / 2, 2)."""
        table = rotary_table(self.config.block_size, head_dim, self.config.rope_base)
        self.register_buffer("freqs_cis", table, persistent=False)

    def rotary(self, embeds: Tensor) -> Any:
        """Return the rotary angles that blocks receive for the positions of (batch, seq, d)."""
        return self.freqs_cis[:, : embeds.shape[1]]

    def tables(self, freqs: Any) -> Rope:
        """Return cosines and sines (seq, head_dim / 2)."""
        return freqs[0, :, 0, :, 0], freqs[0, :, 0, :, 1]

    def forward(
        self,
        input_ids: Tensor,
        input_states: Tensor | None = None,
        num_steps: int | tuple[int, int] | None = None,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        """Run one rollout.

        Parameters
        ----------
        input_ids : int64 array (batch, seq)
            Byte values.
        input_states : float array (batch, seq, d), optional
            State before step 0. Drawn from the global generator when absent.
        num_steps : int or pair of int, optional
            Depth ``N``, without gradient. A pair (n, k) runs n steps without gradient and k more with it. The default
            is ``config.mean_recurrence``.
        use_cache : bool
            Must be false because the class has no cache.

        Returns
        -------
        SimpleNamespace
            `logits` in float32 (batch, seq, vocab). `past_key_values` is None.

        Raises
        ------
        ConfigError
            If the sequence exceeds the rotary table, or the call requests a cache.
        """
        if use_cache:
            raise ConfigError(
                f"{self.config.model_type}: this class has no cache; call it with use_cache=False"
            )
        if input_ids.shape[1] > self.config.block_size:
            raise ConfigError(
                f"{self.config.model_type}: {input_ids.shape[1]} tokens, but positions end at block_size "
                f"{self.config.block_size}; cut the prompts (--seq-len {self.config.block_size})"
            )
        embeds = self.transformer["wte"](input_ids) * self.emb_scale
        freqs = self.rotary(embeds)
        embeds = self.run_blocks("prelude", embeds, freqs)
        x, *_ = self.iterate_forward(embeds, input_states, freqs, torch.tensor(-1), None, None, num_steps)
        x = self.run_blocks("coda", x, freqs)
        logits = self.lm_head(self.transformer["ln_f"](x)).float()
        return SimpleNamespace(logits=logits, past_key_values=None)

    def run_blocks(self, name: str, x: Tensor, freqs: Any) -> Tensor:
        """Run the blocks called `name` on (batch, seq, d)."""
        rope = self.tables(freqs)
        for block in self.transformer[name]:
            x = block(x, rope)
        return x

    def initialize_state(self, input_embeds: Tensor) -> Tensor:
        """Draw the state before step 0 from the global generator: float array (batch, seq, d)."""
        std = self.config.init_values["std"]
        noise = torch.empty_like(input_embeds)
        return nn.init.trunc_normal_(noise, std=std, a=-3 * std, b=3 * std) * self.emb_scale

    def iterate_forward(
        self,
        input_embeds: Tensor,
        input_states: Tensor | None,
        freqs_cis: Any,
        block_idx: Tensor,
        mask: None,
        past_key_values: None,
        num_steps: int | tuple[int, int] | None = None,
    ) -> tuple[Tensor, int, int, Tensor, Tensor]:
        """Run the loop. Return coda input, step counts without and with gradient, state and block number."""
        x = self.initialize_state(input_embeds) if input_states is None else input_states
        depth = self.config.mean_recurrence if num_steps is None else num_steps
        n_plain, n_graph = depth if isinstance(depth, tuple) else (depth, 0)
        for t in range(n_plain + n_graph):
            with torch.set_grad_enabled(torch.is_grad_enabled() and t >= n_plain):
                x, block_idx = self.core_block_forward(
                    x, input_embeds, freqs_cis, mask, past_key_values, block_idx, t
                )
        return self.leave_loop(x), n_plain, n_graph, x.detach(), block_idx

    def leave_loop(self, x: Tensor) -> Tensor:
        """Return the coda's input (batch, seq, d) for the last state."""
        out: Tensor = self.transformer["ln_f"](x)
        return out

    def core_block_forward(
        self,
        x: Tensor,
        input_embeds: Tensor,
        freqs_cis: Any,
        mask: None,
        past_key_values: None,
        block_idx: Tensor,
        current_step: int,
    ) -> tuple[Tensor, Tensor]:
        """Return the state after one step, ``R(s, e)``, and the number of the last block."""
        x = self.transformer["adapter"](torch.cat((x, input_embeds), -1))
        return self.run_blocks("core_block", x, freqs_cis), block_idx + self.config.n_core
