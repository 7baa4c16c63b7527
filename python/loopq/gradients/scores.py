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
from loopq.storage.schema import Object
from loopq.systems.base import LoopedSystem

if TYPE_CHECKING:
    from torch import Tensor

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
    """Predict the cost of each candidate from gradients. One backward pass per prompt serves every layer and candidate.

    Parameters
    ----------
    system : LoopedSystem
        Full-precision model with logits as output. Hidden states are refused.
    candidates : mapping of (str, str) to ndarray, float32
        Key (parameter name, label) and the layer's quantized weight. The weight has the model's orientation.
    tokens : TokenSet
        Prompts. Each needs one backward pass per draw.
    n_steps : int, optional
        Depth. The model's own depth is the default.
    n_draws : int
        Label draws for each prompt.
    execution : Execution, optional
        Its seed determines initial states and labels. Its progress receives every prompt.
    journal : Journal, optional
        Journal for the sums after every prompt. A killed run resumes from it.

    Notes
    -----
    Labels are drawn from the model itself. g is the gradient of their log-likelihood with respect to the shared weight,
    through all steps that use it. Then

        KL ~ 1/2 E <g, D>^2 / n_positions,  D = W^ - W.

    This is the quadratic term of the KL in the direction D. Scores of different positions are uncorrelated, so one
    gradient per prompt is enough. Since g runs through the remaining steps, it includes the effect of the loop on an
    error. It measures exposure, not the layer's own output error.
    """
    import torch  # lazy: loopq imports without torch

    from loopq.gradients.directions import Directions

    if system.output != "logits":
        raise ConfigError(
            f"system {system.name!r} gives hidden states: labels cannot be drawn; use measured scores"
        )
    execution = execution or Execution()
    progress = execution.progress
    depth = system.check_depth(n_steps if n_steps is not None else system.n_steps)
    layers = {name for name, _ in candidates}
    tasks = [Task(p, LayerConfig(), (), None) for p in system.shared_parameters(depth) if p.name in layers]
    keys = {t.name: [key for key in candidates if key[0] == t.name] for t in tasks}
    errors = {t.name: _errors(system, t.parameter, [candidates[key] for key in keys[t.name]]) for t in tasks}
    journal = journal or Journal(None)
    piece = journal.find("fisher")
    saved: Object = piece.facts if piece else {"totals": {}, "positions": 0, "done": 0}
    side = Directions(errors, {n: torch.tensor(v, dtype=torch.float64) for n, v in saved["totals"].items()})
    seed, at_once = execution.seed, execution.batch_size
    backward = Backward(system, tokens, depth, n_draws, seed, at_once, n_positions=int(saved["positions"]))
    done, n_prompts = int(saved["done"]), len(tokens.sequences)
    progress.start("fisher", n_prompts, "prompts")
    progress.advance(done)
    for number in backward.run(side, tasks, done, n_prompts):
        if number > done:
            totals = {name: found.tolist() for name, found in side.totals.items()}
            journal.save("fisher", totals=totals, positions=backward.n_positions, done=number)
            progress.advance(number - done)
            done = number
    progress.stop()
    for t in tasks:
        if t.name not in side.totals and not t.parameter.routed_in:
            raise SystemContractError(f"no gradient reaches {t.name}: use measured scores")
    share = 0.5 / (n_draws * backward.n_positions)
    # An expert without a gradient costs nothing.
    found = {n: side.totals.get(n, torch.zeros(len(own), dtype=torch.float64)) for n, own in keys.items()}
    return {key: share * float(found[key[0]][keys[key[0]].index(key)]) for key in candidates}


def _errors(system: LoopedSystem, p: SharedParameter, values: Sequence[NDArray[np.float32]]) -> Tensor:
    """Errors of a layer's candidates, one after the other, with outputs first."""
    import torch  # lazy: loopq imports without torch

    weight = p.matrix(stored_weight(system, p)).float()
    return torch.stack([p.matrix(system.to_device(torch.from_numpy(np.array(w)))) - weight for w in values])
