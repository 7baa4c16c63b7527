"""A model in a Python file."""

from __future__ import annotations

MODULE = """
import torch
from torch import nn


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        # Both are larger or smaller than the vocabulary, and neither is read by token ids.
        self.positions, self.steps = nn.Embedding(300, 16), nn.Embedding(8, 16)
        self.core, self.head = nn.Linear(16, 16), nn.Linear(16, 256)

    def forward(self, ids, n_steps=4):
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        for t in range(n_steps):
            x = x + torch.tanh(self.core(x + self.steps.weight[t]))
        return self.head(x)


def make():
    torch.manual_seed(0)
    return Loop()
"""
