"""The optimiser of the zoo: orthogonalised momentum for matrices inside blocks, Adam for the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Quintic Newton-Schulz coefficients: singular values land in about [0.7, 1.2] after five rounds.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(g: Tensor, rounds: int = 5) -> Tensor:
    """Return a matrix with the singular vectors of ``g`` and singular values near one."""
    wide = g.shape[0] <= g.shape[1]
    x = (g if wide else g.T).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        a = x @ x.T
        x = _A * x + (_B * a + _C * a @ a) @ x
    return (x if wide else x.T).to(g.dtype)


class Mixed:
    """Momentum with orthogonalised updates for 2-D weights, Adam for embeddings, norms and vectors.

    Parameters
    ----------
    model : nn.Module
        Its parameters are updated in place.
    matrix_lr, vector_lr : float
        Peak learning rates of the two groups.
    weight_decay : float
        Decoupled, on matrices only.
    """

    def __init__(self, model: nn.Module, matrix_lr: float, vector_lr: float, weight_decay: float) -> None:
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        params = [p for p in model.parameters() if p.requires_grad]
        self.matrices = [p for p in params if p.ndim == 2 and id(p) not in tables and min(p.shape) > 1]
        chosen = {id(p) for p in self.matrices}
        self.adam = torch.optim.Adam(
            [p for p in params if id(p) not in chosen], lr=vector_lr, betas=(0.9, 0.95), eps=1e-8
        )
        self.momentum = [torch.zeros_like(p) for p in self.matrices]
        self.matrix_lr, self.vector_lr, self.weight_decay = matrix_lr, vector_lr, weight_decay

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Apply one update with both learning rates multiplied by ``scale``."""
        for group in self.adam.param_groups:
            group["lr"] = self.vector_lr * scale
        self.adam.step()
        lr = self.matrix_lr * scale
        for p, m in zip(self.matrices, self.momentum, strict=True):
            if p.grad is None:
                continue
            m.lerp_(p.grad, 0.05)
            update = orthogonalise(p.grad.lerp(m, 0.95))
            p.mul_(1 - lr * self.weight_decay)
            p.add_(update, alpha=-lr * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs."""
        return {"adam": self.adam.state_dict(), "momentum": self.momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.adam.load_state_dict(state["adam"])
        for mine, saved in zip(self.momentum, state["momentum"], strict=True):
            mine.copy_(saved)
