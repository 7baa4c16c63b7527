"""Plant outliers of large models into small ones without changing the function: a large column or activation.

A hook in front of a layer divides one input channel by a power of two. The weight's column is multiplied by it. The
output keeps all its bits, while the quantized layer and its Hessian look like those of a model with an outlier.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from loopq.calibrate.data import TokenSet
from loopq.calibrate.hooks import Observer
from loopq.errors import ConfigError
from loopq.paper.models import OpenedModel
from loopq.settings.execution import Execution
from loopq.systems.declare import parameter_of

if TYPE_CHECKING:
    from torch import Tensor

    from loopq.layers.shared import SharedParameter
    from loopq.systems.base import LoopedSystem

#: Factor of the weight's column: the channel of its input has the inverse.
FACTORS = {"outlier": 64.0, "spike": 1 / 256, "token": 1 / 256}


def plant(
    source: OpenedModel, kind: str, tokens: TokenSet, execution: Execution | None = None
) -> OpenedModel:
    """Plant an outlier of large models into a loaded model.

    Parameters
    ----------
    source : OpenedModel
        The model is changed in place and computes the same function.
    kind : {"outlier", "spike", "token"}
        "outlier" makes the largest column of each feedback-exposed weight 64 times larger and its input smaller.
        "spike" acts on the down projection of each MLP in the loop. The channel with the largest share of its energy
        at step 0 becomes 256 times larger, and its column smaller. "token" does the same for the first token.
    tokens : TokenSet
        Prompts for choosing the channels.
    execution : Execution, optional
        Seed and batch size.

    Raises
    ------
    ConfigError
        If the model has no suitable layer.
    """
    system = source.loaded.system
    shared = system.shared_parameters(system.n_steps)
    if kind == "outlier":
        chosen = {p: int(_matrix(system, p).norm(dim=0).argmax()) for p in shared if p.exposed}
    else:
        downs = [p for p in shared if p.role == "mlp" and p.in_features > p.out_features and p.owners]
        chosen = _loud(system, downs, tokens, kind, execution or Execution()) if downs else {}
    if not chosen:
        what = "feedback-exposed layer" if kind == "outlier" else "MLP with a down projection in its loop"
        raise ConfigError(f"{source.name}: no {kind} can be planted, for it has no {what}")
    for p, column in chosen.items():
        _scale(system, p, column, FACTORS[kind])
    return dataclasses.replace(
        source, name=f"{source.name}+{kind}", planted=kind, planted_in=tuple(p.name for p in chosen)
    )


def _matrix(system: LoopedSystem, p: SharedParameter) -> Any:
    return p.matrix(parameter_of(system.model, p).detach())


def _loud(
    system: LoopedSystem, layers: list[SharedParameter], tokens: TokenSet, kind: str, execution: Execution
) -> dict[SharedParameter, int]:
    """Channel of each layer with the largest share of its energy at step 0, or at the first token.

    Channels below the median there are left out because a share of almost no energy carries no information.
    """
    here: dict[str, Tensor] = {}
    total: dict[str, Tensor] = {}

    def add(p: SharedParameter, step: int, rows: Any) -> None:
        energy = rows.double().square()
        each = energy.reshape(-1, tokens.sequences[0].size, energy.shape[-1])
        there = each[:, 0] if kind == "token" else each.flatten(0, 1) if step == 0 else each[:0, 0]
        here[p.name] = here.get(p.name, 0.0) + there.sum(0)
        total[p.name] = total.get(p.name, 0.0) + energy.sum(0)

    with Observer(system, layers, add) as observer:
        for batch in tokens.batches(execution.batch_size, execution.seed):
            with observer.rollout(batch):
                system.rollout(batch, system.n_steps)
    channels = {}
    for p in layers:
        share = here[p.name] / total[p.name].clamp_min(1e-30)
        share[here[p.name] < here[p.name].median()] = 0.0
        channels[p] = int(share.argmax())
    return channels


def _scale(system: LoopedSystem, p: SharedParameter, column: int, factor: float) -> None:
    """Multiply a column of the weight by a power of two, and divide the channel of its input."""
    _matrix(system, p)[:, column].mul_(factor)

    def quiet(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        scaled = args[0].clone()
        scaled[..., column].div_(factor)
        return (scaled, *args[1:])

    for owner in p.owners:
        system.model.get_submodule(owner).register_forward_pre_hook(quiet)
