"""Perturbations other than rounding: random and trained rank-4 updates, output-matched noise (Li, App. F)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.analysis.diagnosis.rollouts import Comparison, run_variants
from loopq.analysis.diagnosis.weights import Matrix, as_stored, rounded, weight_of
from loopq.errors import ConfigError, require
from loopq.models.replace import Replaced
from loopq.quantizers.config import LayerConfig
from loopq.storage.schema import Object
from loopq.systems.declare import parameter_of
from loopq.systems.stepwise import single_steps, steps_of

if TYPE_CHECKING:
    from torch import Tensor

    from loopq.analysis.diagnosis.context import Context
    from loopq.layers.shared import SharedParameter
    from loopq.systems.base import LoopedSystem

Floats = NDArray[np.float64]
Updates = Mapping[str, Floats]
#: Rank of an update.
RANK = 4
#: Random inputs that output errors are averaged over.
_N_MEASUREMENTS = 5


def scaled_to(updates: Updates, norm: float) -> dict[str, Floats]:
    """Scale several updates together so that sqrt(sum ||D||_F^2) is `norm`.

    Raises
    ------
    ConfigError
        All updates are zero.
    """
    size = float(np.sqrt(sum(np.sum(d**2) for d in updates.values())))
    if size <= 0.0:
        raise ConfigError("all updates are zero: they cannot be scaled to a norm")
    return {name: d * (norm / size) for name, d in updates.items()}


def random_low_rank(
    shapes: Mapping[str, tuple[int, int]], norm: float, rank: int = 4, seed: int = 0
) -> dict[str, Floats]:
    """Draw U V^T with Gaussian factors for each layer. The layers share the norm equally (Li, Table 15).

    Parameters
    ----------
    shapes : mapping of str to (int, int)
        (out_features, in_features) of the layers that share the norm.
    norm : float
        Frobenius norm of all updates together.
    rank : int
        Rank of each update.
    seed : int
        Seed of the factors.
    """
    rng = np.random.default_rng(seed)
    share = norm / np.sqrt(len(shapes))
    out: dict[str, Floats] = {}
    for name, (rows, columns) in shapes.items():
        if rank > min(rows, columns):
            raise ConfigError(f"layer {name}: an update of rank {rank} does not fit shape {(rows, columns)}")
        update = rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, columns))
        out |= scaled_to({name: update}, float(share))
    return out


def trained_low_rank(
    context: Context,
    names: Sequence[str],
    norm: float,
    *,
    rank: int = RANK,
    n_updates: int = 50,
    learning_rate: float = 1e-3,
) -> dict[str, Floats]:
    """Train U V^T on next-token cross-entropy through the whole loop, then scale it to a norm (Li, Table 15).

    Parameters
    ----------
    context : Context
        A model with a single-step function that carries gradients, training prompts and depth. Update i uses prompt i
        modulo their number. The seed also draws the factors.
    names : sequence of str
        Layers trained together.
    norm : float
        Frobenius norm of all updates together after scaling.
    rank, n_updates, learning_rate
        Rank of the factors, and updates and learning rate of Adam. U starts at 0. V has standard deviation
        1/sqrt(rank).

    Notes
    -----
    The factors' gradients follow from the weight's, dU = G V and dV = G^T U. The model needs no new modules. Its
    weights are restored bit for bit.
    """
    system, n_steps, seed = context.system, context.n_steps, context.execution.seed
    if steps_of(system) is None or system.output != "logits":
        raise ConfigError(f"system {system.name!r}: a trained update needs a single-step function and logits")
    torch = require("torch")
    progress = context.execution.progress
    shared = {p.name: p for p in context.parameters}
    _known(names, shared)
    plain = {name: weight_of(system, shared[name]) for name in names}
    rng = np.random.default_rng(seed)
    factors = {}
    for name, w in plain.items():
        u = torch.zeros(w.shape[0], rank, dtype=torch.float64, requires_grad=True)
        v = torch.from_numpy(rng.normal(size=(w.shape[1], rank)) / np.sqrt(rank)).requires_grad_(True)
        factors[name] = (u, v)
    optimiser = torch.optim.Adam([f for pair in factors.values() for f in pair], lr=learning_rate)
    batches = list(context.tokens.batches(1, seed))
    progress.start("train", n_updates, "updates")
    for i in range(n_updates):
        current = {n: plain[n] + (u @ v.T).detach().float().numpy() for n, (u, v) in factors.items()}
        with Replaced(system, as_stored(system, current, n_steps)) as other:
            gradients = _weight_gradients(
                other, batches[i % len(batches)], n_steps, [shared[n] for n in names]
            )
        for name, gradient in gradients.items():
            u, v = factors[name]
            u.grad, v.grad = gradient @ v.detach(), gradient.T @ u.detach()
        optimiser.step()
        progress.advance()
    progress.stop()
    return scaled_to({n: (u @ v.T).detach().numpy() for n, (u, v) in factors.items()}, norm)


def _weight_gradients(
    system: LoopedSystem, batch: Any, n_steps: int, parameters: Sequence[SharedParameter]
) -> dict[str, Tensor]:
    torch = require("torch")
    system = single_steps(system)
    tensors = [parameter_of(system.model, p) for p in parameters]
    wanted = [t.requires_grad for t in tensors]
    try:
        for t in tensors:
            t.requires_grad_(True)
        with torch.enable_grad():
            embedding = system.embed(batch)
            state = system.initial_state(batch, embedding)
            for step in range(system.n_updates(n_steps)):
                state = system.step(state, embedding, step, n_steps)
            logits = system.predict(state, embedding).double()
            target = batch.input_ids.to(logits.device)
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())
            gradients = torch.autograd.grad(loss, tensors)
    finally:
        for t, before in zip(tensors, wanted, strict=True):
            t.requires_grad_(before)
    out = {}
    for p, gradient in zip(parameters, gradients, strict=True):
        value = gradient.double().cpu()
        out[p.name] = p.matrix(value)
    return out


def output_matched_noise(
    weight: Matrix, changed: Matrix, *, n_rows: int = 64, seed: int = 0
) -> tuple[Floats, float]:
    """Gaussian weight noise with the output error that rounding has on random inputs (Li, Table 15).

    Parameters
    ----------
    weight, changed : float32 ndarrays of shape (out_features, in_features)
        Weight and its rounded value. The noise matches its output error.
    n_rows : int
        Rows of each of the random Gaussian inputs that average both output errors.
    seed : int
        Seed of inputs and noise.

    Returns
    -------
    noise : ndarray, float64, shape (out_features, in_features)
    target : float
        Mean output-error norm per input row.
    """
    rng = np.random.default_rng(seed)
    inputs = [rng.normal(size=(n_rows, weight.shape[1])) for _ in range(_N_MEASUREMENTS)]
    error = changed.astype(np.float64) - weight
    noise = rng.normal(size=weight.shape)

    def size(d: Floats) -> float:
        return float(np.mean([np.linalg.norm(x @ d.T) / np.sqrt(n_rows) for x in inputs]))

    target = size(error)
    return noise * (target / size(noise)), target


def locations(parameters: Sequence[SharedParameter]) -> dict[str, list[str]]:
    """Layers to compare: the exposed ones, and the MLP of the first core block.

    Returns
    -------
    dict of str to list of str
        "exposed" and "core". Empty where one of them would have no layer.
    """
    exposed = [p.name for p in parameters if p.exposed]
    mlp = [p for p in parameters if p.role == "mlp" and not p.exposed]
    if not exposed or not mlp:
        return {}
    block = mlp[0].owners[0].rpartition(".")[0]
    core = [p.name for p in mlp if p.owners[0].rpartition(".")[0] == block][:2]
    return {"exposed": exposed, "core": core}


def perturbation_study(
    context: Context,
    config: LayerConfig,
    grouped: LayerConfig,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    n_updates: int = 50,
) -> Object:
    """Compare perturbations of one norm at the exposed layers and in the core, states paired (Li, Table 15).

    Parameters
    ----------
    context : Context
        Model, evaluation prompts, depth, and prompts of the trained update, which needs logits and a single-step
        function. Initial states have seed 0.
    config, grouped : LayerConfig
        Rounding whose error at the exposed layers is the norm of the updates of rank 4, and rounding whose output error
        is that of the Gaussian noise, separately for each layer.
    n_updates : int
        Adam updates of the trained one.
    seeds : sequence of int
        Draws of the random updates.

    Returns
    -------
    dict
        `norm`, `locations` and `rows`: perturbation, location, seed, agreement and output error at the last step.
    """
    context = context.seeded(0)
    system, train = context.system, context.train
    parameters = {p.name: p for p in context.parameters}
    where = _two_locations(system, list(parameters.values()))
    plain = {name: weight_of(system, parameters[name]) for names in where.values() for name in names}
    changed, target = (
        rounded(system, [parameters[name] for name in plain], c, context.rounder) for c in (config, grouped)
    )
    errors = {name: changed[name].astype(np.float64) - plain[name] for name in where["exposed"]}
    size = _norm(errors)
    trainable = steps_of(system) and system.output == "logits"
    updates: dict[tuple[str, str, int], Updates] = {}
    for place, names in where.items():
        for seed in seeds:
            shapes = {n: plain[n].shape for n in names}
            updates[f"random rank {RANK}", place, seed] = random_low_rank(shapes, size, RANK, seed)
            noise = output_matched_noise(plain[names[0]], target[names[0]], seed=seed)[0]
            updates["output-matched noise", place, seed] = {names[0]: noise}
        if train is not None and trainable:
            trained = trained_low_rank(context.on(train), names, size, n_updates=n_updates)
            updates[f"trained rank {RANK}", place, seeds[0]] = trained
    variants = {
        f"{kind}/{place}/{seed}": {n: (plain[n] + d).astype(np.float32) for n, d in update.items()}
        for (kind, place, seed), update in updates.items()
    }
    runs = run_variants(context, variants, read=(context.n_steps,), label="perturb")
    rows = [
        {"perturbation": k, "location": place, "seed": seed} | _moved(update, runs[f"{k}/{place}/{seed}"])
        for (k, place, seed), update in updates.items()
    ]
    return {"norm": size, "locations": where, "rows": rows}


def _two_locations(system: LoopedSystem, parameters: Sequence[SharedParameter]) -> dict[str, list[str]]:
    if places := locations(parameters):
        return places
    raise ConfigError(
        f"system {system.name!r} needs an exposed layer and an MLP layer beside it: there is nothing to compare"
    )


def _norm(update: Updates) -> float:
    return float(np.sqrt(sum(np.sum(d**2) for d in update.values())))


def _moved(update: Updates, run: Comparison) -> Object:
    data = run.to_json()
    return {
        "norm": _norm(update),
        "agreement": data["agreement"][-1] if data["agreement"] else None,
        "output_error": data["output_error"][-1],
        "last": data["last"],
    }


def _known(names: Sequence[str], shared: Mapping[str, SharedParameter]) -> None:
    unknown = [n for n in names if n not in shared]
    if unknown or not names:
        raise ConfigError(
            f"{', '.join(unknown) or 'no name given'}: name shared parameters; those are: {', '.join(shared)}"
        )
