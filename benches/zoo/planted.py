"""Variants that compute the same function and carry what large models have: a spike, an outlier column."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benches.zoo.models.layers import GatedMLP
from benches.zoo.models.parcae import ParcaeMLP
from benches.zoo.models.rllama import SmallRLlama
from loopq.errors import ConfigError
from loopq.systems import find_system
from loopq.systems.base import Batch
from loopq.zoo.huginn import HuginnMLP, SmallHuginn


@dataclasses.dataclass(frozen=True)
class _Unit:
    """How a kind of MLP is scaled at one hidden unit: rows in, column out, power of kappa that goes in."""

    rows: Callable[[nn.Module, int], Tensor]
    out: Callable[[nn.Module], nn.Linear]
    power: float


_UNITS: dict[type[nn.Module], _Unit] = {
    # Only the up half: the gate goes through SiLU, which no scaling passes.
    HuginnMLP: _Unit(lambda m, u: m.fc.weight[m.fc.out_features // 2 + u], lambda m: m.proj, 1.0),
    GatedMLP: _Unit(lambda m, u: m.up_proj.weight[u], lambda m: m.down_proj, 1.0),
    ParcaeMLP: _Unit(lambda m, u: m.fc.weight[u], lambda m: m.proj, 0.5),
}


def _looped_mlps(model: nn.Module) -> Iterator[tuple[str, nn.Module, _Unit]]:
    for name, module in model.named_modules():
        outside = any(part in {"prelude", "coda"} for part in name.split("."))
        if type(module) in _UNITS and not outside:
            yield name, module, _UNITS[type(module)]


@torch.no_grad()
def _energy_by_step(
    model: nn.Module, tokens: Tensor, seed: int, where: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the mean square (steps, hidden) of every looped MLP's hidden units, over the tokens of a mask."""
    system = find_system(model)
    energies: dict[str, list[Tensor]] = {}
    where = torch.ones_like(tokens, dtype=torch.bool) if where is None else where
    hooks = []
    for name, module, unit in _looped_mlps(model):
        seen = energies.setdefault(name, [])
        hooks.append(
            unit.out(module).register_forward_pre_hook(
                lambda _, args, seen=seen: seen.append(args[0][where].square().mean(0))
            )
        )
    try:
        system.rollout(Batch(tokens, tuple(range(len(tokens))), seed), system.n_steps)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: torch.stack(steps) for name, steps in energies.items()}


def plant_kappa_spike(
    model: nn.Module, tokens: Tensor, kappa: float = 256.0, seed: int = 0, token: int | None = None
) -> tuple[nn.Module, dict[str, int]]:
    """Scale one hidden unit of every looped MLP by ``kappa`` and undo it in its outgoing column.

    Parameters
    ----------
    model : nn.Module
        Left as it is; a copy is changed.
    tokens : int64 array (batch, seq)
        Text to choose units on. Each MLP's unit has the largest ratio of its energy at step 0 to its mean energy at the
        later steps, among the upper half in energy at step 0.
    kappa : float
        The factor. A power of 4 makes all products exact, so that not one bit of the logits moves.
    seed : int
        Seed of the start state.
    token : int, optional
        An id in `tokens`. The unit is then the one with the largest ratio of its energy there to its mean energy. So
        the massive activation is at this token. Large models have it at their first token or at a delimiter.

    Returns
    -------
    planted : nn.Module
        Computes the same function.
    units : dict of str to int
        The unit chosen in each MLP, by module name.

    Raises
    ------
    ConfigError
        If ``kappa`` is not positive, the token is not in the text, or the model has no MLP that can be scaled (GELU has
        none).

    Notes
    -----
    In a gated MLP the up row is scaled, in a squared-ReLU one the whole row by ``sqrt(kappa)``. The Hessian
    of the outgoing layer gets one entry ``kappa^2`` times larger, so its stable rank at step 0 goes to 1.
    """
    if not kappa > 0:
        raise ConfigError(f"kappa must be positive, got {kappa}")
    planted = copy.deepcopy(model)
    chosen: dict[str, int] = {}
    energies = _energy_by_step(planted, tokens, seed)
    if token is not None and not bool((tokens == token).any()):
        raise ConfigError(f"no token {token} in the text that units are chosen on")
    there = None if token is None else _energy_by_step(planted, tokens, seed, tokens == token)
    for name, mlp, unit in _looped_mlps(planted):
        energy = energies[name]
        first = energy[0]
        if there is not None:
            ratio = there[name].mean(0) / energy.mean(0).clamp_min(1e-30)
        else:
            ratio = first / energy[1:].mean(0).clamp_min(1e-30) if len(energy) > 1 else first
        ratio[first < first.median()] = 0.0
        chosen[name] = u = int(ratio.argmax())
        with torch.no_grad():
            unit.rows(mlp, u).mul_(kappa**unit.power)
            unit.out(mlp).weight[:, u].div_(kappa)
    if not chosen:
        raise ConfigError(
            f"{type(model).__name__} has no gated or squared-ReLU MLP in its loop: no spike can be planted; "
            "use huginn, rllama, ouro, nanbeige or parcae"
        )
    return planted, chosen


def plant_adapter_outlier(
    model: nn.Module, factor: float = 64.0, column: int | None = None
) -> tuple[nn.Module, int]:
    """Make one column of the adapter's embedding half ``factor`` times larger and its input smaller.

    Parameters
    ----------
    model : SmallHuginn
        A huginn or rllama model without prelude blocks, or a huginn model with them; a copy is changed.
    factor : float
        The factor; a power of 2 moves no bit of the logits.
    column : int, optional
        Index within the embedding half; absent, the column with the largest norm.

    Returns
    -------
    planted : nn.Module
        Computes the same function. A tied head without prelude comes apart: its embedding table changes and
        its head does not.
    column : int
        The changed column of the adapter's weight, counted over both halves.

    Raises
    ------
    ConfigError
        If the model has no such adapter or the column does not exist.
    """
    if not isinstance(model, SmallHuginn):
        raise ConfigError(f"{type(model).__name__} has no linear adapter: use a huginn or rllama model")
    d = model.config.n_embd
    weight = model.transformer["adapter"].weight.detach()
    j = int(weight[:, d:].norm(dim=0).argmax()) if column is None else column
    if not 0 <= j < d or not factor > 0:
        raise ConfigError(f"column must be in 0 .. {d - 1} and factor positive, got {column} and {factor}")
    planted = _untied(model)
    source = _embedding_source(planted)
    with torch.no_grad():
        planted.transformer["adapter"].weight[:, d + j].mul_(factor)
        source[..., j].div_(factor)
    return planted, d + j


def _untied(model: SmallHuginn) -> SmallHuginn:
    """Return a copy with a separate embedding table where the table feeds the adapter directly."""
    if model.config.n_prelude or not model.config.tie_embeddings:
        return copy.deepcopy(model)
    apart = SmallHuginn(dataclasses.replace(model.config, tie_embeddings=False))
    apart.load_state_dict(model.state_dict())
    apart.train(model.training)
    return apart


def _embedding_source(model: SmallHuginn) -> Tensor:
    """Return the parameter with a last axis that scales the adapter's embedding input channel by channel."""
    prelude = model.transformer["prelude"]
    if not len(prelude):
        table: Tensor = model.transformer["wte"].weight
        return table
    if isinstance(model, SmallRLlama):
        raise ConfigError(
            "rllama: with a residual prelude no single parameter scales a channel; use n_prelude 0"
        )
    norm: Tensor = prelude[-1].norm_4.weight
    return norm
