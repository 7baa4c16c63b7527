"""A small model of COCONUT's kind: a GPT-2 that writes its hidden state to the next position."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopq.errors import ConfigError
from loopq.zoo._layers import merge_heads, split_heads
from loopq.zoo._model import ZooConfig, ZooModel

Past = list[tuple[Tensor, Tensor]]


@dataclasses.dataclass
class CoconutConfig(ZooConfig):
    """Settings of `ZooCoconut`; see `ZooConfig` for the common ones.

    ``n_steps`` counts passes of the base model: latents + 1. The last three ids are start, end and latent.

    Parameters
    ----------
    n_layers : int
        GPT-2 blocks.
    question_length : int
        Positions before the latents; what follows them is the answer.
    """

    model_type: ClassVar[str] = "loopq-zoo-coconut"
    least: ClassVar = {"vocab_size": 4}

    vocab_size: int = 259
    n_steps: int = 5
    n_layers: int = 2
    question_length: int = 32

    @property
    def start_id(self) -> int:
        """Id of the token before the latents."""
        return self.vocab_size - 3

    @property
    def end_id(self) -> int:
        """Id of the token after the latents."""
        return self.vocab_size - 2


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


class GPT2(nn.Module):
    """The base language model: ``transformer`` and a tied ``lm_head``."""

    def __init__(self, config: CoconutConfig) -> None:
        super().__init__()
        d = config.n_embd
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, d),
                "wpe": nn.Embedding(config.block_size, d),
                "h": nn.ModuleList(GPT2Block(config) for _ in range(config.n_layers)),
                "ln_f": nn.LayerNorm(d, eps=config.norm_eps),
            }
        )
        self.lm_head = nn.Linear(d, config.vocab_size, bias=False)
        for table in (self.transformer["wte"], self.transformer["wpe"]):
            nn.init.normal_(table.weight, std=d**-0.5)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, embeds: Tensor, past: Past | None) -> tuple[Tensor, Tensor, Past]:
        """Run new positions (batch, seq, d); returns hidden states after ``ln_f``, logits and the cache."""
        first = past[0][0].shape[2] if past else 0
        x = embeds + self.transformer["wpe"].weight[first : first + embeds.shape[1]]
        kept: Past = []
        for i, block in enumerate(self.transformer["h"]):
            x, pair = block(x, past[i] if past else None)
            kept.append(pair)
        x = self.transformer["ln_f"](x)
        return x, self.lm_head(x).float(), kept


class ZooCoconut(ZooModel):
    """COCONUT-like model: continuous thoughts between a question and its answer.

    Notes
    -----
    The sequence is ``question <start> latent * (N - 1) <end> answer``. Pass 0 runs question and start; each
    latent's input embedding is the hidden state (after ``ln_f``) of the position before it; pass ``t`` runs
    latent ``t - 1`` alone and the last pass the last latent with end and answer. So the passes see
    ``question_length + 1, 1, .., 1, len(answer) + 2`` rows per sequence; with one pass all rows come at once.

    There is no state of fixed shape and so no single-step function; `forward` is the rollout.
    The model is trained on the chains of `loopq.zoo.chains`.
    """

    config_class = CoconutConfig
    prefix_rollouts = False
    config: CoconutConfig

    def __init__(self, config: CoconutConfig) -> None:
        super().__init__()
        self.config = config
        self.base_causallm = GPT2(config)

    def passes(self, input_ids: Tensor, num_steps: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Return hidden states (batch, rows, d) and logits (batch, rows, vocab) of every pass."""
        depth = self.check_inputs(input_ids, num_steps)
        rows, q = input_ids.shape[0], self.config.question_length
        if input_ids.shape[1] < q or input_ids.shape[1] + depth + 1 > self.config.block_size:
            raise ConfigError(
                f"coconut: {input_ids.shape[1]} ids do not fit: the question has {q}, ids + num_steps + 1 "
                f"may be at most block_size {self.config.block_size}"
            )
        table = self.base_causallm.transformer["wte"]
        marks = torch.tensor([self.config.start_id, self.config.end_id], device=input_ids.device)
        start, end = table(marks).expand(rows, 2, -1).split(1, 1)
        text = table(input_ids)
        question, tail = torch.cat((text[:, :q], start), 1), torch.cat((end, text[:, q:]), 1)
        pieces = [question] if depth > 1 else [torch.cat((question, tail), 1)]
        hidden: list[Tensor] = []
        logits: list[Tensor] = []
        past: Past | None = None
        for t in range(depth):
            if t:
                latent = hidden[-1][:, -1:]
                pieces.append(torch.cat((latent, tail), 1) if t == depth - 1 else latent)
            h, out, past = self.base_causallm(pieces[-1], past)
            hidden.append(h)
            logits.append(out)
        return hidden, logits

    def rollout(
        self,
        input_ids: Tensor,
        num_steps: int | None = None,
        init_state: Tensor | None = None,
        seed: int | None = None,
        first_row: int = 0,
    ) -> Tensor:
        """Return logits (batch, seq, vocab) aligned with ``input_ids``; ``seed`` is idle.

        The logits at the question's last position are those of the end token, which predict the answer.
        """
        if init_state is not None:
            raise ConfigError("coconut: the rollout starts from the question; init_state cannot be given")
        depth = self.check_inputs(input_ids, num_steps)
        _, logits = self.passes(input_ids, depth)
        joined, q = torch.cat(logits, 1), self.config.question_length
        return torch.cat((joined[:, : q - 1], joined[:, q + depth :]), 1)

    def states(
        self,
        input_ids: Tensor,
        num_steps: int | None = None,
        init_state: Tensor | None = None,
        seed: int | None = None,
        first_row: int = 0,
    ) -> list[Tensor]:
        """Return the thoughts: the hidden state (batch, 1, d) that ends each pass, without the last pass."""
        return [h[:, -1:] for h in self.passes(input_ids, num_steps)[0][:-1]]

    def asked(self, question: Tensor, num_steps: int) -> Tensor:
        """Return the logits (batch, passes, vocab) that end every pass over a bare question."""
        _, logits = self.passes(question, num_steps)
        return torch.stack([out[:, -1] for out in logits], 1)

    def training_loss(self, ids: Tensor, num_steps: int) -> Tensor:
        """Return the mean loss in nats over the thoughts and the answer of `loopq.zoo.chains`.

        Pass ``t`` is asked for hop ``t`` of the chain through the head. The answer spells the hops from the
        last pass's on, so that following the map is also learnt on letters, where it is easier.
        """
        q = self.config.question_length
        hops = ids[:, q:]
        if hops.shape[1] <= num_steps:
            raise ConfigError(f"coconut: {num_steps} passes need more hops than that, got {hops.shape[1]}")
        _, logits = self.passes(torch.cat((ids[:, :q], hops[:, num_steps - 1 : -1]), 1), num_steps)
        thoughts = [out[:, -1:] for out in logits[:-1]]
        n_answer = hops.shape[1] - num_steps + 1
        asked = torch.cat((*thoughts, logits[-1][:, -n_answer:]), 1)
        return F.cross_entropy(asked.flatten(0, 1), hops.flatten())

    def scored(
        self, ids: Tensor, num_steps: int | None = None, seed: int | None = None, first_row: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return the answer's logits (batch, 1, vocab) and the hop that full depth reaches (batch, 1)."""
        q = self.config.question_length
        depth = self.check_inputs(ids, num_steps)
        return self.asked(ids[:, :q], depth)[:, -1:], ids[:, q + self.config.n_steps - 1, None]
