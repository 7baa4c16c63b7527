"""Derivatives along given errors of weights, in the backward pass, without storing any weight's gradient."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from loopq.gradients.sketch import Kept, Side
from loopq.quantizers.task import Task


class Directions(Side):
    """Sums over gradients g of <g, D>^2, for some errors D of each layer.

    Parameters
    ----------
    errors : mapping of str to Tensor, float32, shape (n_errors, out_features, in_features)
        Errors by parameter name.
    totals : dict of str to Tensor, float64, shape (n_errors)
        Sums by parameter name. They are updated. A layer without a gradient has none.
    """

    def __init__(self, errors: Mapping[str, Tensor], totals: dict[str, Tensor]) -> None:
        super().__init__()
        self._errors, self.totals = errors, totals

    def begin(self, prompt: int, draw: int) -> None:
        """Nothing is drawn."""

    def keep(self, task: Task, rows: Tensor) -> Kept:
        """Return the rows."""
        return (rows,)

    def products(self, name: str, kept: Kept, gradient: Tensor) -> Kept:
        """Return <G^T X, D> of a call."""
        product = gradient.float().T @ kept[0].float()
        # One error after the other takes no more memory than the gradient.
        return (torch.stack([(product * error).sum(dtype=torch.float64) for error in self._errors[name]]),)

    def add(self, name: str, products: Kept) -> None:
        """Add the squares."""
        squares = products[0].square().cpu()
        self.totals[name] = self.totals[name] + squares if name in self.totals else squares
