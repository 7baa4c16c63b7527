"""Parcae's class in small: elementwise decay and injection, squared ReLU, value embeddings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import ClassVar

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

GATE_INPUTS = 32


@dataclasses.dataclass
class ParcaeConfig(SmallConfig):
    """Settings of `SmallParcae`; see `SmallConfig` for the common ones.

    Parameters
    ----------
    mean_recurrence : int
        Depth ``N`` the model is used at.
    n_prelude, n_core, n_coda : int
        Blocks before, in and after the loop.
    rope_base : float
        Base of the rotary angles.
    """

    model_type: ClassVar[str] = "loopq-zoo-parcae"
    state_init: ClassVar[str] = "like-init"
    multiples: ClassVar = (("n_embd", 2, "n_heads"),)
    least: ClassVar = {"n_embd": GATE_INPUTS, "n_prelude": 0, "n_coda": 0}

    mean_recurrence: int = 8
    n_prelude: int = 0
    n_core: int = 2
    n_coda: int = 0
    rope_base: float = 10_000.0

    @property
    def init(self) -> SimpleNamespace:
        """Its `get_std` gives the standard deviation of the start state: ``sqrt(2 / (5 d))``."""
        return SimpleNamespace(get_std=lambda name: math.sqrt(2.0 / (5.0 * self.n_embd)))


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


class SmallParcae(nn.Module):
    """Parcae's class: a diagonal injection and core blocks in a loop; plain torch.

    Notes
    -----
    ``e = ln_prelude(prelude(wte(ids)))``; noise state of std ``sqrt(2 / (5 d))``; a step is the diagonal
    injection and the core blocks; logits are ``lm_head(ln_f(coda(C(s_N))))`` with a tied head. Odd blocks add
    value embeddings of the tokens; every call of the blocks reads the ids from ``_current_input_ids``. As in
    the published class, a forward without a depth draws one for each sequence, and the noise comes from the
    global generator.
    """

    def __init__(self, config: ParcaeConfig) -> None:
        super().__init__()
        self.config = config
        self.emb_scale = 1.0
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
                **parts,
                "ln_prelude": RMSNorm(d, config.norm_eps),
                "adapter": DiagonalInjection(d),
                "C": nn.Linear(d, d, bias=False),
                "ln_f": RMSNorm(d, config.norm_eps),
            }
        )
        self.value_embeds = nn.ModuleDict({str(i): nn.Embedding(config.vocab_size, d) for i in gated})
        self.lm_head = nn.Linear(d, config.vocab_size, bias=False)
        init_linears(self, config.n_prelude + config.n_core * config.mean_recurrence + config.n_coda)
        nn.init.eye_(self.transformer["C"].weight)
        self.lm_head.weight = self.transformer["wte"].weight
        self._current_input_ids: Tensor | None = None
        table = rotary_table(config.block_size, d // config.n_heads, config.rope_base)
        self.register_buffer("freqs_cis", table, persistent=False)

    def run_blocks(self, name: str, x: Tensor, freqs_cis: Tensor) -> Tensor:
        """Run the blocks called `name` on (batch, seq, d) for the current ids."""
        rope = (freqs_cis[0, :, 0, :, 0], freqs_cis[0, :, 0, :, 1])
        for i, block in enumerate(self.transformer[name]):
            key = str(self._first[name] + i)
            given = self.value_embeds[key](self._current_input_ids) if key in self.value_embeds else None
            x = block(x, rope, given)
        return x

    def forward(
        self,
        input_ids: Tensor,
        return_logits: bool = False,
        num_steps_pair: Sequence[int] | None = None,
    ) -> dict[str, Tensor | None]:
        """Run one rollout.

        Parameters
        ----------
        input_ids : int64 array (batch, seq)
            Byte values; no more than `block_size`.
        return_logits : bool
            Whether the logits are wanted.
        num_steps_pair : pair of int, optional
            Steps without and with gradient. Absent, each sequence draws its own depth.

        Returns
        -------
        dict
            `logits`: float32 (batch, seq, vocab) or None.

        Raises
        ------
        ConfigError
            If the sequence is longer than the rotary table.
        """
        if input_ids.shape[1] > self.config.block_size:
            raise ConfigError(
                f"parcae: {input_ids.shape[1]} tokens, but positions end at block_size {self.config.block_size}"
            )
        freqs_cis = self.freqs_cis[:, : input_ids.shape[1]]
        self._current_input_ids = input_ids
        parts = self.transformer
        embeds = parts["ln_prelude"](self.run_blocks("prelude", parts["wte"](input_ids), freqs_cis))
        x, *_ = self.iterate_forward(embeds, freqs_cis, None, num_steps_pair)
        x = self.run_blocks("coda", parts["C"](x), freqs_cis)
        return {"logits": self.lm_head(parts["ln_f"](x)).float() if return_logits else None}

    def initialize_state(self, input_embeds: Tensor) -> Tensor:
        """Draw the state before step 0 from the global generator: float array (batch, seq, d)."""
        std = self.config.init.get_std("embedding") * self.emb_scale
        return nn.init.trunc_normal_(torch.empty_like(input_embeds), std=std, a=-3 * std, b=3 * std)

    def iterate_forward(
        self,
        input_embeds: Tensor,
        freqs_cis: Tensor,
        mask: None,
        num_steps_pair: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, int, Tensor]:
        """Run the loop; return the last state, the steps without and with gradient, and that state detached."""
        x = self.initialize_state(input_embeds)
        if num_steps_pair is None:
            rows = torch.full((len(x),), float(self.config.mean_recurrence), device=x.device)
            n_plain, n_graph = torch.poisson(rows).long(), 0
        else:
            n_plain, n_graph = torch.full((len(x),), num_steps_pair[0], device=x.device), num_steps_pair[1]
        total = torch.tensor(int(n_plain.max()) + n_graph)
        for t in range(int(total)):
            with torch.set_grad_enabled(torch.is_grad_enabled() and t >= int(n_plain.max())):
                after = self.core_block_forward(x, input_embeds, freqs_cis, mask, torch.tensor(t), total)
                # A sequence that is done keeps its state: its update is computed and thrown away.
                x = torch.where((t < n_plain + n_graph)[:, None, None], after, x)
        return x, n_plain, n_graph, x.detach()

    def core_block_forward(
        self, x: Tensor, input_embeds: Tensor, freqs_cis: Tensor, mask: None, step: Tensor, total: Tensor
    ) -> Tensor:
        """Return the state after one step for the current ids."""
        return self.run_blocks("core_block", self.transformer["adapter"](x, input_embeds), freqs_cis)
