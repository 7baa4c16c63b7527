"""Cost of the quantization of a single layer for the model: measured, or predicted from one backward pass.

A cost is KL(full precision || quantized) in nats for a position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.data import TokenSet
from loopq.errors import ConfigError, SystemContractError
from loopq.evaluate.compare import compare
from loopq.gradients.unroll import linked, unroll
from loopq.settings.execution import Execution
from loopq.storage.journal import Journal
from loopq.systems.base import LoopedSystem, model_code

if TYPE_CHECKING:
    from torch import Tensor

#: (parameter name, label) to a quantized weight in the model's orientation: one layer changed, all others
#: in full precision.
Candidates = Mapping[tuple[str, str], NDArray[np.float32]]
Costs = dict[tuple[str, str], float]


def measured(
    system: LoopedSystem,
    candidates: Candidates,
    tokens: TokenSet,
    *,
    n_steps: int | None = None,
    seed: int = 0,
) -> Costs:
    """Measure the cost of each candidate by one rollout with that layer replaced.

    Parameters
    ----------
    system : LoopedSystem
        Full-precision model.
    candidates : mapping of (str, str) to ndarray, float32
        Key (parameter name, label) and the layer's quantized weight. The weight has the model's orientation.
    tokens : TokenSet
        Prompts.
    n_steps : int, optional
        Depth. The model's own depth is the default.
    seed : int
        Seed of the initial states.
    """
    variants = {f"{layer}|{label}": {layer: weight} for (layer, label), weight in candidates.items()}
    found = compare(system, variants, tokens, n_steps=n_steps, seeds=(seed,))[1:]
    return {key: float(m.kl.mean()) for key, m in zip(candidates, found, strict=True)}


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
    """Predict these costs from gradients. One backward pass per prompt serves every layer and candidate.

    Parameters
    ----------
    system : LoopedSystem
        Full-precision model with logits as output. Hidden states are refused.
    candidates : mapping of (str, str) to ndarray, float32
        As in `measured`.
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

    if system.output != "logits":
        raise ConfigError(
            f"system {system.name!r} gives hidden states: labels cannot be drawn; use measured scores"
        )
    execution = execution or Execution()
    seed, progress = execution.seed, execution.progress
    depth = system.check_depth(n_steps if n_steps is not None else system.n_steps)
    layers = sorted({layer for layer, _ in candidates})
    parameters = {name: system.weight(name) for name in layers}
    experts = {p.name for p in system.shared_parameters(depth) if p.routed_in}
    errors = {
        key: system.to_device(torch.from_numpy(np.ascontiguousarray(w))).double()
        - parameters[key[0]].detach().double()
        for key, w in candidates.items()
    }
    journal = journal or Journal(None)
    piece = journal.find("fisher")
    zero: dict[str, Any] = {"totals": [0.0] * len(candidates), "positions": 0, "done": 0}
    saved = piece.facts if piece else zero
    totals = dict(zip(candidates, saved["totals"], strict=True))
    positions, done = int(saved["positions"]), int(saved["done"])
    progress.start("fisher", len(tokens.sequences), "prompts")
    progress.advance(done)
    for number, batch in enumerate(islice(tokens.batches(1, seed), done, None), start=done + 1):
        leaves = {name: p.detach().clone().requires_grad_(True) for name, p in parameters.items()}
        with linked(system, leaves), model_code(f"gradient of prompt {batch.prompts[0]}"):
            logits = tokens.scored(unroll(system, batch, depth).float(), system.output)
            logp = logits.log_softmax(-1)
            for sample in range(n_draws):
                labels = draw_labels(logp, [seed, batch.prompts[0], sample])
                picked = logp.gather(-1, labels[..., None]).sum()
                last = sample + 1 == n_draws
                grads = torch.autograd.grad(
                    picked, [leaves[n] for n in layers], retain_graph=not last, allow_unused=True
                )
                by_name = dict(zip(layers, grads, strict=True))
                for key, error in errors.items():
                    gradient = by_name[key[0]]
                    if gradient is not None:
                        totals[key] += float((gradient.double() * error).sum()) ** 2
                    elif key[0] not in experts:
                        raise SystemContractError(f"no gradient reaches {key[0]}: use measured scores")
        positions += logp.shape[0] * logp.shape[1]
        journal.save("fisher", totals=list(totals.values()), positions=positions, done=number)
        progress.advance()
    progress.stop()
    return {key: 0.5 * total / (n_draws * positions) for key, total in totals.items()}


def draw_labels(logp: Tensor, seed: Sequence[int]) -> Tensor:
    """Draw labels from the model's own distribution.

    Parameters
    ----------
    logp : Tensor, float32, shape (n_prompts, n_positions, vocabulary)
        Log-probabilities in nats.
    seed : sequence of int
        Seed of the draw.

    Returns
    -------
    Tensor, int64, shape (n_prompts, n_positions)
        Labels, on the same device.

    Notes
    -----
    The draw is a race: for independent exponential E_k, argmin_k E_k / p_k has the distribution p. Two processors round
    p differently. If the other has p', the label changes with a probability of at most sum_k |p_k - p'_k|. Inversion of
    the cumulative distribution F would give sum_k |F_k - F'_k|, ten times as much on the embedded model. Numpy draws
    the E_k for every device, because the devices' own generators differ.
    """
    import torch  # lazy: loopq imports without torch

    waiting = np.random.default_rng(list(seed)).standard_exponential(tuple(logp.shape))
    return (torch.from_numpy(waiting).to(logp.device).log_() - logp.detach()).argmin(-1)
