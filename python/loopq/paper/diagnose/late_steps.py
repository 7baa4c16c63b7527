"""Compare two sets of weight errors by their proxy at a late step (Li, App. P)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from loopq import _native as native
from loopq.errors import ConfigError

Floats = NDArray[np.float64]


def late_step_wins(
    candidate: Mapping[str, NDArray[np.float32]],
    baseline: Mapping[str, NDArray[np.float32]],
    late: Mapping[str, Floats],
) -> tuple[int, int]:
    """Count layers with a smaller late-step proxy under one set of errors than under another (Li, App. P).

    Parameters
    ----------
    candidate, baseline : mapping of str to float32 ndarray of shape (out_features, in_features)
        Weight errors of each layer, for example under skip-0 and under full accumulation.
    late : mapping of str to ndarray, shape (in_features, in_features)
        H of the late step.

    Returns
    -------
    (int, int)
        Layers where the candidate wins, and all layers.

    Notes
    -----
    Li, App. P counts 335 of 336 layers where perplexity improved. Where it did not, it counts 168 of 168. This count
    thus does not predict the model's output.
    """
    if set(candidate) != set(baseline) or set(candidate) - set(late):
        raise ConfigError("both sets of errors and the Hessians must name the same layers")
    wins = sum(
        native.proxy(candidate[name], None, late[name]) < native.proxy(baseline[name], None, late[name])
        for name in candidate
    )
    return wins, len(candidate)
