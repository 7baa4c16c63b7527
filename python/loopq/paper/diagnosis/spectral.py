"""Spectral radius and norm of the Jacobian of a recurrence step, without forming it (Li, App. K)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.analysis.diagnosis.weights import Weights
from loopq.errors import ConfigError, require
from loopq.evaluation.stats import mean_interval
from loopq.paper.diagnosis.stepmap import Bypass, StepMap, final_state, last_step, promoted
from loopq.paper.stats import difference_in_differences
from loopq.storage.schema import Object
from loopq.systems.stepwise import steps_of

if TYPE_CHECKING:
    from torch import Tensor

    from loopq.analysis.diagnosis.context import Context
    from loopq.systems.base import Batch, LoopedSystem

Floats = NDArray[np.float64]
Product = Callable[[Floats], Floats]

N_RESAMPLES = 10_000
#: Start vectors of an estimate, which must agree.
_N_STARTS = 2


@dataclass(frozen=True)
class ArnoldiSettings:
    """Settings and acceptance rules of the estimate. The defaults are those of Li, App. K.

    Parameters
    ----------
    k, ncv : int
        Number of requested eigenvalues and of Krylov vectors.
    tol : float
        Tolerance of the iteration.
    max_products : int
        Maximum number of Jacobian products per estimate.
    residual_limit : float
        Largest accepted relative Ritz residual ||Jv - theta v|| / |theta|.
    agreement_limit : float
        Largest accepted relative difference between two start vectors.
    """

    k: int = 4
    ncv: int = 64
    tol: float = 1e-5
    max_products: int = 4096
    residual_limit: float = 1e-3
    agreement_limit: float = 2e-3


@dataclass(frozen=True)
class RadiusEstimate:
    """Result from one start vector: radius, relative Ritz residual, products and reason of failure ("" if none)."""

    radius: float
    residual: float
    n_products: int
    failure: str = ""


@dataclass(frozen=True)
class Radius:
    """Spectral radius of one map.

    Parameters
    ----------
    radius : float
        Mean over the start vectors.
    residual : float
        Largest relative Ritz residual.
    disagreement : float
        Range of the start vectors' results divided by their mean.
    n_products : int
        Jacobian products of all start vectors.
    accepted : bool
        Whether all acceptance rules hold.
    failure : str
        The violated rule, in words.
    """

    radius: float
    residual: float
    disagreement: float
    n_products: int
    accepted: bool
    failure: str = ""


class _Cap(Exception):
    """The limit of products is reached."""


def estimate(product: Product, dim: int, start: Floats, settings: ArnoldiSettings) -> RadiusEstimate:
    """Largest eigenvalue magnitude by implicitly restarted Arnoldi.

    Parameters
    ----------
    product : callable
        v -> J v on float64 vectors.
    dim : int
        Dimension. Up to `settings.ncv`, the size of the Krylov space, the matrix is formed and solved densely.
    start : float64 ndarray of shape (dim,)
        Start vector.
    settings : ArnoldiSettings
        Settings.
    """
    count = 0
    stretch = 0.0

    def counted(v: Floats) -> Floats:
        nonlocal count, stretch
        if count >= settings.max_products:
            raise _Cap
        count += 1
        flat = np.asarray(v, dtype=np.float64).reshape(-1)
        out = product(flat)
        stretch = max(stretch, float(np.linalg.norm(out)) / max(float(np.linalg.norm(flat)), 1e-300))
        return out

    failure = ""
    try:
        if dim <= settings.ncv:
            values, vectors = np.linalg.eig(np.stack([counted(e) for e in np.eye(dim)], axis=1))
        else:
            values, vectors = _arnoldi(counted, dim, start, settings)
    except _Cap:
        return RadiusEstimate(
            float("nan"), float("inf"), count, f"no convergence in {settings.max_products} products"
        )
    best = int(np.argmax(np.abs(values)))
    theta, vector = complex(values[best]), vectors[:, best]
    image = product(np.ascontiguousarray(vector.real)) + 1j * product(np.ascontiguousarray(vector.imag))
    # A radius of 0 has no relative residual. It is then relative to the largest observed ||J v|| / ||v||.
    scale: float = abs(theta) if abs(theta) > 1e-10 * stretch else max(stretch, 1e-300)
    residual = float(np.linalg.norm(image - theta * vector) / (scale * np.linalg.norm(vector)))
    if not residual < settings.residual_limit:
        failure = f"relative Ritz residual {residual:.2e} is not below {settings.residual_limit:g}"
    return RadiusEstimate(float(abs(theta)), residual, count + 2, failure)


def _one_thread() -> Any:
    """Keep ARPACK's vector operations on one thread.

    They are small and alternate with the products. With one thread per core, they and the products' threads would wait
    for each other. This made the iteration eight times slower.
    """
    return require("threadpoolctl").threadpool_limits(limits=1, user_api="blas")


def _arnoldi(product: Product, dim: int, start: Floats, settings: ArnoldiSettings) -> tuple[Any, Any]:
    linalg = require("scipy.sparse.linalg")
    operator = linalg.LinearOperator((dim, dim), matvec=product, dtype=np.float64)
    # The limit of products ends it: each iteration takes at least one.
    with _one_thread():
        return linalg.eigs(  # type: ignore[no-any-return]
            operator, k=settings.k, ncv=settings.ncv, tol=settings.tol, which="LM", v0=start,
            maxiter=settings.max_products,
        )  # fmt: skip


def spectral_radius(
    product: Product, dim: int, starts: Sequence[Floats], settings: ArnoldiSettings | None = None
) -> Radius:
    """Estimate the radius from several start vectors and apply the acceptance rules (Li, App. K).

    Parameters
    ----------
    product : callable
        v -> J v.
    dim : int
        Dimension.
    starts : sequence of float64 ndarray of shape (dim,)
        Start vectors. Use the same ones for all maps that are compared.
    settings : ArnoldiSettings, optional
        Those of Li, App. K when absent.

    Notes
    -----
    An estimate is accepted if every residual and the disagreement of the starts are below their limits. For a strongly
    non-normal map a small residual does not bound the eigenvalue's error. The rules are applied as published, and
    `spectral_norm` is reported too.
    """
    settings = settings or ArnoldiSettings()
    estimates = [estimate(product, dim, s, settings) for s in starts]
    radii = np.array([e.radius for e in estimates])
    mean = float(radii.mean())
    spread = float(np.ptp(radii))
    disagreement = spread / mean if mean > 0 else spread
    failure = next((e.failure for e in estimates if e.failure), "")
    if not failure and not disagreement <= settings.agreement_limit:
        failure = f"the start vectors differ by {disagreement:.2e}, above {settings.agreement_limit:g}"
    return Radius(
        mean,
        max(e.residual for e in estimates),
        disagreement,
        sum(e.n_products for e in estimates),
        not failure,
        failure,
    )


def spectral_norm(product: Product, transposed: Product, dim: int, tol: float = 1e-5) -> float:
    """Largest singular value sigma_1(J) from products with J and J^T (Li, App. K)."""
    if dim <= 64:
        return float(np.linalg.norm(np.stack([product(e) for e in np.eye(dim)], axis=1), 2))
    linalg = require("scipy.sparse.linalg")
    operator = linalg.LinearOperator(
        (dim, dim), matvec=lambda v: transposed(product(v.reshape(-1))), dtype=np.float64
    )
    start = np.random.default_rng(0).normal(size=dim)
    with _one_thread():
        (value,) = linalg.eigsh(operator, k=1, tol=tol, v0=start, return_eigenvectors=False)
    return float(np.sqrt(max(value, 0.0)))


def on_vectors(times: Callable[[Tensor], Tensor], state: Tensor) -> Product:
    """Let a linear map of states take and return float64 vectors."""
    torch = require("torch")

    def product(v: Floats) -> Floats:
        out: Floats = times(torch.from_numpy(v).to(state).reshape(state.shape)).double().cpu().numpy()
        return out.reshape(-1)

    return product


def start_vectors(dim: int) -> list[Floats]:
    """Gaussian start vectors, shared by all maps of one dimension."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=dim) for _ in range(_N_STARTS)]


def jacobian_at(step: StepMap, state: Tensor, *, with_norm: bool = False) -> Object:
    """Spectral radius of a step at one prompt's state, and its spectral norm if `with_norm`."""
    step.check(state)
    product = on_vectors(step.products(state)[0], state)
    dim = state.numel()
    out: Object = asdict(spectral_radius(product, dim, start_vectors(dim)))
    if with_norm:
        out["norm"] = spectral_norm(product, on_vectors(step.transposed(state), state), dim)
    return out


def radius_study(context: Context, weights: Weights, *, with_bypass: bool = True) -> Object:
    """Spectral radii of the full-precision and the changed step, with and without the bypass (Li, App. K).

    Parameters
    ----------
    context : Context
        A model with a single-step function, prompts and depth. Each prompt gives one estimate per map, operating state
        and start vector. The operating state is the final state of the rollout.
    weights : weights
        Replaced weights of the changed map, outputs first.
    with_bypass : bool
        Also measure both maps with the identity bypass, and all four at the bypassed rollout's final state. sigma_1 is
        measured of the full-precision and the changed map, without the bypass.

    Returns
    -------
    dict
        `prompts` has an entry per prompt and operating state. `states` has the mean radii for each operating state,
        the number of prompts above 1, and the difference in differences with its interval. `acceptance` counts the
        accepted estimates, with the largest residual and disagreement.
    """
    system, tokens, n_steps = context.system, context.tokens, context.n_steps
    seed, progress = context.execution.seed, context.execution.progress
    if steps_of(system) is None:
        raise ConfigError(f"system {system.name!r} has no single-step function, so no Jacobian of a step")
    places = ("plain", "bypassed") if with_bypass else ("plain",)
    maps = [(False, False), (True, False), *([(False, True), (True, True)] if with_bypass else [])]
    progress.start("jacobian", len(tokens.sequences) * len(places) * len(maps), "maps")
    entries = []
    with promoted(system.model):
        for batch in tokens.batches(1, seed):
            for place in places:
                embedding, state = _operating_state(system, batch, n_steps, place == "bypassed")
                by_map = {}
                for changed, bypassed in maps:
                    normed = not bypassed and place == "plain"
                    with last_step(
                        system, embedding, n_steps, weights if changed else None, bypassed
                    ) as step:
                        at = jacobian_at(step, state, with_norm=normed)
                    by_map[_map_name(changed, bypassed)] = at
                    progress.advance()
                entries.append({"prompt": batch.prompts[0], "state": place, "maps": by_map})
    progress.stop()
    by_place = {place: [e for e in entries if e["state"] == place] for place in places}
    return {
        "prompts": entries,
        "states": {place: _summary(of_place, with_bypass) for place, of_place in by_place.items()},
        "acceptance": _acceptance(entries),
        "settings": asdict(ArnoldiSettings()) | {"n_starts": _N_STARTS, "seed": seed},
    }


def _map_name(changed: bool, bypassed: bool) -> str:
    return ("changed" if changed else "reference") + (", bypass" if bypassed else "")


def _operating_state(system: LoopedSystem, batch: Batch, n_steps: int, bypassed: bool) -> tuple[Any, Any]:
    if not bypassed:
        return final_state(system, batch, n_steps)
    with Bypass(system, n_steps) as bypass:
        return final_state(system, batch, n_steps, bypass)


def _summary(entries: Sequence[Object], with_bypass: bool) -> Object:
    # A prompt with a rejected estimate is counted and left out as a whole, so that maps stay paired.
    good = [e for e in entries if all(m["accepted"] for m in e["maps"].values())]
    out: Object = {"n_prompts": len(entries), "n_accepted": len(good), "maps": {}, "did": None}
    if not good:
        return out
    radii = {name: np.array([e["maps"][name]["radius"] for e in good]) for name in good[0]["maps"]}
    for name, values in radii.items():
        norms = [e["maps"][name]["norm"] for e in good if "norm" in e["maps"][name]]
        out["maps"][name] = {
            "radius": _interval(values),
            "above_one": int((values > 1).sum()),
            "norm": _interval(np.array(norms)) if norms else None,
        }
    out["shift"] = _interval(radii["changed"] - radii["reference"])
    if with_bypass:
        out["shift_bypass"] = _interval(radii["changed, bypass"] - radii["reference, bypass"])
        out["did"] = difference_in_differences(
            radii["reference"], radii["changed"], radii["reference, bypass"], radii["changed, bypass"],
            n_resamples=N_RESAMPLES,
        ).to_json()  # fmt: skip
    return out


def _interval(values: Floats) -> Object:
    return mean_interval(values, n_resamples=N_RESAMPLES).to_json()


def _acceptance(entries: Sequence[Object]) -> Object:
    maps = [m for e in entries for m in e["maps"].values()]
    return {
        "n_maps": len(maps),
        "n_estimates": _N_STARTS * len(maps),
        "n_accepted": sum(m["accepted"] for m in maps),
        "largest_residual": max(m["residual"] for m in maps),
        "largest_disagreement": max(m["disagreement"] for m in maps),
        "n_products": sum(m["n_products"] for m in maps),
        "failures": sorted({m["failure"] for m in maps if m["failure"]}),
    }
