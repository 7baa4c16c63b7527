"""Models without logits: the error of their hidden states by step, and a probe for masked tokens.

The probe is a ridge regression from the final hidden state of a masked position to the masked token. It is fitted
once, on the full-precision model and separate text. It is then applied to the states of all sets of weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.analysis.diagnosis.rollouts import trace
from loopq.calibrate.data import TokenSet
from loopq.errors import require
from loopq.models.replace import Replaced, Weights
from loopq.storage.schema import Object
from loopq.systems.base import Batch, LoopedSystem
from loopq.terminal.progress import Progress, Silent

MASK_SHARE = 0.2
MASK_ID = 0
RIDGE = 1e-2
_BATCH = 8

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Probe:
    """A linear map from hidden states to tokens.

    Parameters
    ----------
    weight : float64 ndarray of shape (width + 1, n_tokens)
        The last row is the intercept.
    tokens : int64 ndarray of shape (n_tokens,)
        Token of each column.
    n_positions : int
        Masked positions of the fit.
    """

    weight: Floats
    tokens: Ints
    n_positions: int

    def predict(self, states: Floats) -> Ints:
        """Return the token with the highest score for each of the states (n, width)."""
        tokens: Ints = self.tokens[(states @ self.weight[:-1] + self.weight[-1]).argmax(1)]
        return tokens


def masked(tokens: TokenSet) -> list[tuple[Batch, Ints]]:
    """Mask `MASK_SHARE` of each prompt's positions. The choice depends on the prompt's number.

    Returns
    -------
    list of (Batch, ndarray)
        Prompts with `MASK_ID` at the masked positions. The array has the masked ids, and -1 elsewhere.
    """
    torch = require("torch")
    batches = []
    for numbers in tokens.plan(_BATCH):
        ids = np.stack([tokens.sequences[i] for i in numbers])
        draws = [np.random.default_rng([0, i]).random(ids.shape[1]) for i in numbers]
        picks = np.stack(draws) < MASK_SHARE
        hidden = torch.from_numpy(np.where(picks, MASK_ID, ids))
        batches.append((Batch(hidden, tuple(numbers)), np.where(picks, ids, -1)))
    return batches


def fit_probe(system: LoopedSystem, tokens: TokenSet, progress: Progress | None = None) -> Probe:
    """Fit the probe on the states of the unchanged model.

    Parameters
    ----------
    system : LoopedSystem
        A system with hidden states as output.
    tokens : TokenSet
        Prompts used neither for calibration nor for evaluation.
    progress : Progress, optional
        Advanced by every prompt.

    Notes
    -----
    X (n, width + 1) holds the states of the masked positions and a column of ones. Y holds their tokens as one-hot
    rows. In float64, W = (X^T X + c mean(diag X^T X) I)^-1 X^T Y with c = `RIDGE`.
    """
    progress = progress or Silent()
    progress.start("probe", len(tokens.sequences), "prompts")
    states, answers = [], []
    for batch, truth in masked(tokens):
        out = system.rollout(batch, system.n_steps).double().cpu().numpy()
        states.append(out[truth >= 0])
        answers.append(truth[truth >= 0])
        progress.advance(len(batch.prompts))
    progress.stop()
    y = np.concatenate(answers)
    known, index = np.unique(y, return_inverse=True)
    x = np.concatenate([np.concatenate(states), np.ones((len(y), 1))], axis=1)
    gram = x.T @ x
    gram[np.diag_indices_from(gram)] += RIDGE * gram.diagonal().mean()
    weight = np.linalg.solve(gram, x.T @ np.eye(len(known))[index])
    return Probe(weight, known, len(y))


def measure_states(
    system: LoopedSystem,
    variants: Mapping[str, Weights],
    tokens: TokenSet,
    probe: Probe,
    progress: Progress | None = None,
) -> Object:
    """Measure several sets of weights on masked prompts: states by step, and the probe's predictions.

    Parameters
    ----------
    system : LoopedSystem
        A system with a single-step function and hidden states as output.
    variants : mapping of str to weights
        Differing parameters by the variant's name.
    tokens : TokenSet
        Prompts.
    probe : Probe
        Result of `fit_probe`.
    progress : Progress, optional
        Advanced by every prompt.

    Returns
    -------
    dict
        "full precision" and each variant have `error` and `cosine` of the states after each step. Both are relative to
        full precision and means over prompts. The other entries count by prompt. `hits` are masked positions with a
        correct prediction. `same` are those with the prediction of full precision. `masked` is the number of masked
        positions.
    """
    progress = progress or Silent()
    names = ["full precision", *variants]
    rows: dict[str, dict[str, list[Any]]] = {
        name: {k: [] for k in ("error", "cosine", "hits", "same", "masked")} for name in names
    }
    progress.start("states", len(tokens.sequences), "prompts")
    for batch, truth in masked(tokens):
        exact = _states(system, batch)
        expected = _read(probe, exact[-1], truth)
        for name in names:
            with Replaced(system, variants.get(name, {})) as other:
                states = exact if name == names[0] else _states(other, batch)
            row = rows[name]
            row["error"] += np.transpose([_error(a, b) for a, b in zip(exact, states, strict=True)]).tolist()
            row["cosine"] += np.transpose(
                [_cosine(a, b) for a, b in zip(exact, states, strict=True)]
            ).tolist()
            answer = _read(probe, states[-1], truth)
            row["hits"] += ((answer == truth) & (truth >= 0)).sum(1).tolist()
            row["same"] += ((answer == expected) & (truth >= 0)).sum(1).tolist()
            row["masked"] += (truth >= 0).sum(1).tolist()
        progress.advance(len(batch.prompts))
    progress.stop()
    return {
        name: row | {k: np.mean(row[k], axis=0).tolist() for k in ("error", "cosine")}
        for name, row in rows.items()
    }


def _states(system: LoopedSystem, batch: Batch) -> list[Floats]:
    """States after each step as float64 arrays of shape (n_prompts, n_tokens, width)."""
    states = trace(system, batch, system.n_steps, read=()).states[1:]
    return [state.double().cpu().numpy() for state in states]


def _read(probe: Probe, states: Floats, truth: Ints) -> Ints:
    """Predictions of the probe at masked positions, and -1 elsewhere."""
    predicted = np.full_like(truth, -1)
    predicted[truth >= 0] = probe.predict(states[truth >= 0])
    return predicted


def _error(a: Floats, b: Floats) -> Sequence[float]:
    """Relative l2 distance of each prompt."""
    x, y = a.reshape(len(a), -1), b.reshape(len(b), -1)
    errors: list[float] = (np.linalg.norm(x - y, axis=1) / np.linalg.norm(x, axis=1)).tolist()
    return errors


def _cosine(a: Floats, b: Floats) -> Sequence[float]:
    x, y = a.reshape(len(a), -1), b.reshape(len(b), -1)
    cosine: list[float] = ((x * y).sum(1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))).tolist()
    return cosine
