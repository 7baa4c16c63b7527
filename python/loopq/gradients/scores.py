"""Cost of the quantization of a single layer for the model, predicted from one backward pass.

A cost is KL(full precision || quantized) in nats for a position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.data import TokenSet
from loopq.errors import ConfigError, SystemContractError
from loopq.gradients.backward import Backward
from loopq.layers.shared import SharedParameter
from loopq.models.replace import stored_weight
from loopq.quantizers.config import LayerConfig
from loopq.quantizers.task import Task
from loopq.settings.execution import Execution
from loopq.storage.journal import Journal
from loopq.systems.base import LoopedSystem
from loopq.terminal.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

    from loopq.gradients.directions import Directions

#: (parameter name, label) to a quantized weight in the model's orientation: one layer changed, all others
#: in full precision.
Candidates = Mapping[tuple[str, str], NDArray[np.float32]]
Costs = dict[tuple[str, str], float]


def loop_fisher(
    system: LoopedSystem,
    candidates: Candidates,
    tokens: TokenSet,
    *,
    n_steps: int | None = None,
    n_draws: int = 1,
    execution: Execution | None = None,
    journal: Journal | None = None,
) -> Costs:
    """Predict the cost of each candidate from gradients. One backward pass per prompt serves all.

    Parameters
    ----------
    system : LoopedSystem
        Full-precision model with logits as output. Hidden states are refused.
    candidates : mapping of (str, str) to ndarray, float32
        Key (parameter name, label) and the layer's quantized weight. The weight has the model's orientation.
    tokens : TokenSet
        Prompts. Each needs one backward pass per draw.
    n_steps, n_draws : int
        Depth (the model's own when absent), and label draws for each prompt.
    execution : Execution, optional
        Its seed determines initial states and labels.
    journal : Journal, optional
        Keeps the sums after every prompt. A killed run resumes from it.

    Notes
    -----
    Labels are drawn from the model itself. g is the gradient of their log-likelihood with respect to the shared weight,
    through all steps that use it. Then

        KL ~ 1/2 E <g, D>^2 / n_positions,  D = W^ - W.

    This is the quadratic term of the KL in the direction D. Scores of different positions are uncorrelated, so one
    gradient per prompt is enough. It runs through the remaining steps, and so measures exposure, not the layer's own
    output error.
    """

    from loopq.gradients.directions import Directions

    if system.output != "logits":
        what = f"system {system.name!r} gives hidden states"
        raise ConfigError(f"{what}: labels cannot be drawn; use measured scores")
    execution = execution or Execution()
    depth = system.check_depth(n_steps if n_steps is not None else system.n_steps)
    layers = {name for name, _ in candidates}
    tasks = [Task(p, LayerConfig(), (), None) for p in system.shared_parameters(depth) if p.name in layers]
    keys = {t.name: [key for key in candidates if key[0] == t.name] for t in tasks}
    errors = {t.name: _errors(system, t.parameter, [candidates[key] for key in keys[t.name]]) for t in tasks}
    side = Directions(errors, {})
    backward = Backward(system, tokens, depth, n_draws, execution.seed, execution.batch_size)
    _run(backward, side, tasks, journal or Journal(None), execution.progress)
    for t in tasks:
        if t.name not in side.totals and not t.parameter.routed_in:
            raise SystemContractError(f"no gradient reaches {t.name}: use measured scores")
    share = 0.5 / (n_draws * backward.n_positions)
    # An expert without a gradient costs nothing.
    sums = {key: t for n, part in keys.items() for key, t in zip(part, side.totals.get(n, ()), strict=False)}
    return {key: share * float(sums.get(key, 0.0)) for key in candidates}


def _run(
    backward: Backward, side: Directions, tasks: Sequence[Task], journal: Journal, progress: Progress
) -> None:
    """Add up the gradients of all prompts, from the saved sums on."""
    import torch  # lazy: loopq imports without torch

    done, n_prompts = 0, len(backward.tokens.sequences)
    if piece := journal.find("fisher"):
        saved = piece.facts
        side.totals.update({n: torch.tensor(v, dtype=torch.float64) for n, v in saved["totals"].items()})
        done, backward.n_positions = int(saved["done"]), int(saved["positions"])
    progress.start("fisher", n_prompts, "prompts")
    progress.advance(done)
    for number in backward.run(side, tasks, done, n_prompts):
        if number > done:
            totals = {name: total.tolist() for name, total in side.totals.items()}
            journal.save("fisher", totals=totals, positions=backward.n_positions, done=number)
            progress.advance(number - done)
            done = number
    progress.stop()


def _errors(system: LoopedSystem, p: SharedParameter, values: Sequence[NDArray[np.float32]]) -> Tensor:
    """Errors of a layer's candidates, one after the other, with outputs first."""
    import torch  # lazy: loopq imports without torch

    weight = p.matrix(stored_weight(system, p)).float()
    return torch.stack([p.matrix(system.to_device(torch.from_numpy(np.array(w)))) - weight for w in values])
