"""A loop with everything that hides from hooks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from loopq.systems.base import Batch


class Odd(nn.Module):
    """A loop with everything that hides from hooks: bare parameters, weights without a call, split and normed
    weights, an idle layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.loop = nn.Linear(8, 8)
        self.twin = nn.Linear(8, 8)
        self.twin.weight = self.loop.weight
        self.hidden = nn.Linear(8, 8, bias=False)
        self.bare = nn.Parameter(torch.randn(8, 8))
        self.parts = nn.Parameter(torch.randn(8, 8))
        self.normed = nn.Parameter(torch.randn(8, 8))
        self.stacked, self.places = nn.Parameter(torch.randn(2, 8, 8)), nn.Parameter(torch.randn(1, 1, 8))
        self.idle = nn.Linear(8, 8)
        self.once = nn.Linear(8, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.places
        for _ in range(2):
            x = x + torch.einsum("btd,hde->bte", x, self.stacked)
            x = self.twin(torch.tanh(self.loop(x)))
            x = (
                F.linear(x, self.hidden.weight)
                + x[:, :1] @ self.bare
                + F.linear(x, self.parts[:4]).repeat(1, 1, 2)
            )
            x = x + F.linear(x, F.normalize(self.normed))
        x = self.loop(x[:, -1:]) + x
        return self.once(x)


class UniversalTransformer(nn.Module):
    """Four hops through one block of attention and two convolutions over neighbouring tokens."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.pad = nn.ConstantPad1d((1, 1), 0.0)
        self.wide, self.narrow = nn.Conv1d(width, 2 * width, 3), nn.Conv1d(2 * width, width, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for hop in range(4):
            y = self.norms[0](x + torch.sin(torch.tensor(1.0 + hop)))
            x = x + self.out(F.scaled_dot_product_attention(self.query(y), self.key(y), self.value(y)))
            y = self.norms[1](x).mT
            x = x + self.narrow(self.pad(F.relu(self.wide(self.pad(y))))).mT
        return self.head(x)


def _ids(n: int = 3) -> Batch:
    return Batch(torch.randint(0, 60, (n, 5), generator=torch.Generator().manual_seed(0)), tuple(range(n)))


class Settling(nn.Module):
    """Ends by its state: when a step changes it by less than a tolerance, as equilibrium solvers do."""

    def __init__(self, tolerance: float = 0.02) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.core, self.tolerance = nn.Embedding(64, 32), nn.Linear(32, 32), tolerance

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        state = torch.zeros_like(x)
        for _ in range(50):
            before, state = state, torch.tanh(self.core(state) + x)
            if (state - before).norm() < self.tolerance * state.norm():
                break
        return state
