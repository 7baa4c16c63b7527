"""COCONUT's class in small: a GPT-2 that writes its hidden state to the next position."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopq.zoo.config import SmallConfig
from loopq.zoo.layers import merge_heads, split_heads

Past = list[tuple[Tensor, Tensor]]


@dataclasses.dataclass
class CoconutConfig(SmallConfig):
    """Settings of `SmallCoconut`; see `SmallConfig` for the common ones. The last three ids are start, end and latent.

    Parameters
    ----------
    n_layers : int
        GPT-2 blocks.
    """

    model_type: ClassVar[str] = "loopq-zoo-coconut"
    least: ClassVar = {"vocab_size": 4}

    vocab_size: int = 259
    n_layers: int = 2


class Conv1D(nn.Module):
    """GPT-2's linear: ``x W + b`` with ``W`` stored (in, out)."""

    def __init__(self, n_in: int, n_out: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out).normal_(std=std))
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class GPT2Attention(nn.Module):
    """Causal attention of new positions over the kept ones and themselves."""

    def __init__(self, config: CoconutConfig) -> None:
        super().__init__()
        d = config.n_embd
        self.n_heads = config.n_heads
        self.c_attn = Conv1D(d, 3 * d, d**-0.5)
        self.c_proj = Conv1D(d, d, (2 * d * config.n_layers) ** -0.5)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (split_heads(part, self.n_heads) for part in self.c_attn(x).chunk(3, -1))
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.tril(k.shape[2] - q.shape[2]))
        return self.c_proj(merge_heads(y)), (k, v)


class GPT2MLP(nn.Module):
    """``c_proj(gelu_tanh(c_fc(x)))``."""

    def __init__(self, config: CoconutConfig) -> None:
        super().__init__()
        d, wide = config.n_embd, config.intermediate_size
        self.c_fc = Conv1D(d, wide, d**-0.5)
        self.c_proj = Conv1D(wide, d, (2 * wide * config.n_layers) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return out


class GPT2Block(nn.Module):
    """``x += attn(ln_1(x)); x += mlp(ln_2(x))``."""

    def __init__(self, config: CoconutConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.norm_eps)
        self.attn = GPT2Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.norm_eps)
        self.mlp = GPT2MLP(config)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        attended, kept = self.attn(self.ln_1(x), past)
        x = x + attended
        return x + self.mlp(self.ln_2(x)), kept


class GPT2Model(nn.Module):
    """The stack: ``transformer(inputs_embeds=..., past_key_values=..., use_cache=...)``."""

    def __init__(self, config: CoconutConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(GPT2Block(config) for _ in range(config.n_layers))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.norm_eps)
        for table in (self.wte, self.wpe):
            nn.init.normal_(table.weight, std=config.n_embd**-0.5)

    def forward(
        self, inputs_embeds: Tensor, past_key_values: Past | None = None, use_cache: bool = True
    ) -> SimpleNamespace:
        """Run new positions (batch, seq, d) after those that are kept."""
        first = past_key_values[0][0].shape[2] if past_key_values else 0
        positions = torch.arange(first, first + inputs_embeds.shape[1], device=inputs_embeds.device)
        x = inputs_embeds + self.wpe(positions)
        kept: Past = []
        for i, block in enumerate(self.h):
            x, pair = block(x, past_key_values[i] if past_key_values else None)
            kept.append(pair)
        return SimpleNamespace(last_hidden_state=self.ln_f(x), past_key_values=kept if use_cache else None)


class GPT2(nn.Module):
    """The base language model: ``transformer`` and a tied ``lm_head``."""

    def __init__(self, config: CoconutConfig) -> None:
        super().__init__()
        self.transformer = GPT2Model(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight


class SmallCoconut(nn.Module):
    """COCONUT's wrapper around a GPT-2: continuous thoughts between a question and its answer.

    Notes
    -----
    The ids are ``question <start> <latent> * n <end> answer``. Pass 0 runs up to the first latent. Each
    latent's input embedding is the hidden state (after ``ln_f``) of the position before it. Pass ``t`` runs
    latent ``t - 1`` alone, and the last pass the last latent with end and answer. So the passes see
    ``question + 1, 1, .., 1, answer + 2`` rows per sequence; without latents all rows come at once.
    """

    def __init__(self, config: CoconutConfig) -> None:
        super().__init__()
        self.config = config
        self.base_causallm = GPT2(config)
        self.embedding = self.base_causallm.transformer.wte
        last = config.vocab_size
        self.start_latent_id, self.end_latent_id, self.latent_token_id = last - 3, last - 2, last - 1

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        """Run all passes.

        Parameters
        ----------
        input_ids : int64 array (batch, seq)
            Every row has its latents at the same positions.

        Returns
        -------
        SimpleNamespace
            `logits`, float32 (batch, seq, vocab), and `inputs_embeds` (batch, seq, d), with the thoughts at the
            latents' positions.
        """
        latents = (input_ids[0] == self.latent_token_id).nonzero().flatten().tolist()
        logits: list[Tensor] = []
        embeds: list[Tensor] = []
        thought: Tensor | None = None
        past: Past | None = None
        for piece in self.embedding(input_ids).tensor_split(latents, 1):
            embeds.append(piece if thought is None else torch.cat((thought, piece[:, 1:]), 1))
            out = self.base_causallm.transformer(inputs_embeds=embeds[-1], past_key_values=past)
            thought, past = out.last_hidden_state[:, -1:], out.past_key_values
            logits.append(self.base_causallm.lm_head(out.last_hidden_state).float())
        return SimpleNamespace(logits=torch.cat(logits, 1), inputs_embeds=torch.cat(embeds, 1))
