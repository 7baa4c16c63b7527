"""Weights of the steps' Hessians: step 0 against the others, or equal shares of the channels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from loopq.errors import ConfigError, SolveError
from loopq.settings.steps import WEIGHTINGS, StepSums, Weigher

BALANCE_ROUNDS = 200
_ALPHA = re.compile(r"[0-9]{1,18}(/[0-9]{1,18}|\.[0-9]{1,18})?|\.[0-9]{1,18}")


@WEIGHTINGS.register("alpha")
def read_alpha(value: str) -> Weigher:
    """Read A of "alpha=A", as an exact number.

    Raises
    ------
    ConfigError
        It is not in [0, 1].
    """
    try:
        alpha = Fraction(value) if _ALPHA.fullmatch(value) else None
    except ZeroDivisionError:
        alpha = None
    if alpha is None or alpha > 1:
        raise ConfigError("write alpha=A with A in [0, 1], as in alpha=1/4 or alpha=0.25")
    return lambda sums, steps: alpha_weights(alpha, len(steps))


@WEIGHTINGS.register("balanced")
def read_balanced(value: str) -> Weigher:
    """Refuse a value: "balanced" takes none."""
    if value:
        raise ConfigError("write balanced, without a value")
    return balanced_weights


def alpha_weights(alpha: Fraction, n_steps: int) -> list[Fraction]:
    """Exact weights of H = alpha H_0 + (1 - alpha) mean(H_1, ..., H_{N-1}).

    alpha = 1/N gives all steps equal weight. 0 omits step 0, and 1 omits the others.
    """
    if n_steps == 1:
        return [Fraction(1)]
    return [alpha] + [(1 - alpha) / (n_steps - 1)] * (n_steps - 1)


def balanced_weights(sums: StepSums, steps: Sequence[int]) -> list[float]:
    """Weights that give every step the same share of the channels.

    Returns
    -------
    list of float
        w with sum_j w_t H_t,jj / S_jj equal for all t, S = sum_t w_t H_t.

    Notes
    -----
    Scaling the activations of one step, or of one channel in all steps, scales S accordingly and changes no step's
    share. Therefore a channel with massive activations cannot decide which step counts. A step without activation gets
    weight 0. The weights are found by fixed-point iteration, which is Sinkhorn's on the diagonals.
    """
    table = np.stack([sums.diagonal([t]) for t in steps])
    live = table.sum(axis=1) > 0
    if not live.any():
        raise SolveError("step_weights 'balanced': every activation is zero at every step")
    table = table[live][:, table.sum(axis=0) > 0]
    table = table / table.sum(axis=0)
    w = 1.0 / table.sum(axis=1)
    for _ in range(BALANCE_ROUNDS):
        share = (table / (w @ table)).sum(axis=1)
        new = 1.0 / share
        new *= len(new) / new.sum()
        if np.allclose(new, w, rtol=1e-13, atol=0):
            break
        w = new
    out = np.zeros(len(live))
    out[live] = w
    return [float(v) for v in out]
