"""A loop with a block that sends each token to one of four experts."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, N_EXPERTS, N_STEPS, VOCABULARY = 16, 4, 3, 64


class Expert(nn.Module):
    """Two linear layers that read one input, and one that reads their product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 24, bias=False)
        self.up_proj = nn.Linear(WIDTH, 24, bias=False)
        self.down_proj = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


class RoutingBlock(nn.Module):
    """Sends each token to one expert; `closed` lists those that never get one, `empty` calls these with no rows."""

    def __init__(self, closed: tuple[int, ...], empty: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, N_EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(N_EXPERTS))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.closed, self.empty = closed, empty

    def chosen(self, x: torch.Tensor) -> torch.Tensor:
        score = self.gate(x)
        score[..., list(self.closed)] = -torch.inf
        return score.argmax(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, out = self.chosen(x), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if self.empty or bool(mine.any()):
                out[mine] = expert(x[mine])
        return x + self.mix(out)


class RoutedLoop(nn.Module):
    """``s = block(s)`` three times, between an embedding and a head."""

    def __init__(self, closed: tuple[int, ...] = (), empty: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.block = RoutingBlock(closed, empty)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for _ in range(N_STEPS):
            x = self.block(x)
        return self.head(x)


def routed_loop(closed: tuple[int, ...] = (), empty: bool = False) -> RoutedLoop:
    """The model with drawn weights, in eval mode."""
    torch.manual_seed(3)
    model = RoutedLoop(closed, empty).eval()
    with torch.no_grad():
        # Such weights that tokens change their expert from step to step.
        for expert in model.block.experts:
            for linear in (expert.gate_proj, expert.up_proj, expert.down_proj):
                linear.weight.mul_(3)
    return model


def unfused_olmoe(**changes: int) -> nn.Module:
    """A tiny OLMoE that runs its two middle layers twice, as the loader returns it."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    from loopq.models.experts import unfuse

    settings = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2} | changes
    config = OlmoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, looped_layers=[1, 3, 2], **settings,
    )  # fmt: skip
    model = OlmoeForCausalLM(config)
    unfuse(model)
    return model
