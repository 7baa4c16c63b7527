"""State-space controls: which component of a selective scan makes an error grow along the tokens (Li, App. N).

The recurrence h_t = A_t h_{t-1} + B_t x_t with A_t = exp(dt_t A) runs over tokens. Public Mamba classes do not return
its states. This module recomputes them in float64 from hooked activations and checks every result against the model's
scan output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.errors import ConfigError, SystemContractError, require
from loopq.paper.controls.rounding import round_signed
from loopq.storage.schema import Object

if TYPE_CHECKING:
    from torch import nn

Floats = NDArray[np.float64]

COMPONENTS = ("A_log", "in_proj", "x_proj", "dt_proj", "out_proj")
#: Components that the study perturbs.
STUDIED = ("A_log", "in_proj", "x_proj", "out_proj")
GROUP_SIZE = 128
# Absolute error, relative error and norm by token.
CURVES = ("absolute", "relative", "norm")


@dataclass(frozen=True)
class Scan:
    """Inputs and parameters of one layer's scan over one prompt.

    Parameters
    ----------
    x : float64 ndarray of shape (n_tokens, width)
        Input after convolution and activation.
    dt : float64 ndarray of shape (n_tokens, width)
        Step sizes, above 0.
    A_log : float64 ndarray of shape (width, n_modes)
        A = -exp(A_log).
    B, C : float64 ndarrays of shape (n_tokens, n_modes)
        Input and output maps of each token.
    D : float64 ndarray of shape (width,)
        Feed-through.
    """

    x: Floats
    dt: Floats
    A_log: Floats
    B: Floats
    C: Floats
    D: Floats

    def decay(self) -> Floats:
        """Multipliers exp(dt_t A) in (0, 1), of shape (n_tokens, width, n_modes)."""
        out: Floats = np.exp(self.dt[:, :, None] * -np.exp(self.A_log))
        return out

    def states(self, alpha: float = 0.0) -> Floats:
        """States h_t (n_tokens, width, n_modes). The recurrence has the extra term alpha h_{t-1} (Li, Table 21)."""
        decay = self.decay() + alpha
        drive = (self.dt * self.x)[:, :, None] * self.B[:, None, :]
        h = np.zeros(self.A_log.shape)
        out = np.empty((len(self.x), *self.A_log.shape))
        for t in range(len(self.x)):
            h = decay[t] * h + drive[t]
            out[t] = h
        return out

    def outputs(self) -> Floats:
        """y_t = C_t h_t + D x_t, of shape (n_tokens, width)."""
        out: Floats = np.einsum("twm,tm->tw", self.states(), self.C) + self.D * self.x
        return out


@dataclass(frozen=True)
class Divergence:
    """Distance between the states of two runs by token.

    Parameters
    ----------
    absolute : float64 ndarray of shape (n_tokens,)
        ||h_t^q - h_t||.
    norm : float64 ndarray of shape (n_tokens,)
        ||h_t||. Compare it with the relative error, which falls where the states grow, independent of the error.
    """

    absolute: Floats
    norm: Floats

    @property
    def relative(self) -> Floats:
        """||h_t^q - h_t|| / ||h_t||, shape (n_tokens,)."""
        return self.absolute / np.maximum(self.norm, np.finfo(np.float64).tiny)


def diverge(perturbed: Floats, reference: Floats) -> Divergence:
    """Compare states (n_tokens, width, n_modes) token by token."""
    n = len(reference)
    return Divergence(
        np.linalg.norm((perturbed - reference).reshape(n, -1), axis=1),
        np.linalg.norm(reference.reshape(n, -1), axis=1),
    )


def find_mixers(model: nn.Module) -> dict[int, nn.Module]:
    """Map layer number to mixer module. `COMPONENTS` identify a mixer.

    Raises
    ------
    SystemContractError
        If the model has no such modules.
    """
    mixers = [m for m in model.modules() if all(hasattr(m, n) for n in COMPONENTS)]
    if not mixers:
        kind = type(model).__name__
        raise SystemContractError(f"{kind} has no selective-scan layer with {', '.join(COMPONENTS)}")
    return dict(enumerate(mixers))


def capture(model: nn.Module, layer: int, ids: Sequence[int]) -> Scan:
    """Run a Mamba model over one prompt and return one layer's scan.

    Parameters
    ----------
    model : nn.Module
        A model with the attribute names of the public classes. It is in eval mode.
    layer : int
        Layer number.
    ids : sequence of int
        Token ids of one prompt.

    Raises
    ------
    SystemContractError
        If the recomputed scan does not reproduce the model's output.
    """
    torch = require("torch")
    mixers = find_mixers(model)
    if layer not in mixers:
        raise ConfigError(f"the model has layers 0 to {len(mixers) - 1}; got {layer}")
    mixer: Any = mixers[layer]
    hooked: dict[str, Floats] = {}

    def keep(name: str, value: Any) -> None:
        hooked[name] = value[0].detach().to("cpu", torch.float64).numpy()

    def keep_both(module: Any, args: Any, out: Any) -> None:
        keep("x", args[0])
        keep("dbc", out)

    handles = [
        mixer.in_proj.register_forward_hook(lambda m, i, out: keep("in", out)),
        mixer.x_proj.register_forward_hook(keep_both),
        mixer.out_proj.register_forward_pre_hook(lambda m, i: keep("out", i[0])),
    ]
    try:
        with torch.no_grad():
            model(torch.as_tensor([list(ids)], device=mixer.A_log.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    if len(hooked) != 4:
        raise SystemContractError(
            f"layer {layer}: x_proj or out_proj was bypassed (fused kernels in training mode?); "
            "use model.eval()"
        )
    scan = _scan_of(mixer, hooked)
    _check_scan(scan, hooked, layer, torch.finfo(mixer.out_proj.weight.dtype).eps)
    return scan


def _check_scan(scan: Scan, hooked: dict[str, Floats], layer: int, eps: float) -> None:
    gate = hooked["in"][:, scan.x.shape[1] :]
    gate = gate / (1 + np.exp(-gate))
    error = float(np.linalg.norm(scan.outputs() * gate - hooked["out"]))
    # The feed-through D x can dominate the output. The error is therefore compared with the output of the states, plus
    # the rounding of the activations.
    part = max(float(np.linalg.norm((scan.outputs() - scan.D * scan.x) * gate)), 1e-300)
    if not error <= 2e-2 * part + 4 * eps * float(np.linalg.norm(hooked["out"])):
        raise SystemContractError(
            f"layer {layer}: the recomputed scan differs from the model's by {error / part:.2e} of the part that comes "
            "from the states; the layer's recurrence is not h = exp(dt A) h + dt B x"
        )


def _scan_of(mixer: Any, hooked: dict[str, Floats]) -> Scan:
    weights = {
        name: value.detach().double().cpu().numpy()
        for name, value in (
            ("A_log", mixer.A_log),
            ("D", mixer.D),
            ("dt", mixer.dt_proj.weight),
            ("bias", mixer.dt_proj.bias),
        )
    }
    n_modes, rank = weights["A_log"].shape[1], weights["dt"].shape[1]
    step, b, c = np.split(hooked["dbc"], [rank, rank + n_modes], axis=1)
    dt = np.logaddexp(0.0, step @ weights["dt"].T + weights["bias"])
    return Scan(hooked["x"], dt, weights["A_log"], b, c, weights["D"])


def component_weight(mixer: Any, component: str) -> Any:
    """Return the parameter of one component."""
    if component not in COMPONENTS:
        raise ConfigError(f"component must be one of {', '.join(COMPONENTS)}; got {component!r}")
    return mixer.A_log if component == "A_log" else getattr(mixer, component).weight


def rounding_error(weight: Floats, component: str) -> Floats:
    """INT4 error of a component: `A_log` with one scale, projections in groups of 128 (Li, App. N)."""
    return round_signed(weight, 4, None if component == "A_log" else GROUP_SIZE) - weight


def gaussian_error(weight: Floats, norm: float, seed: int) -> Floats:
    """Gaussian perturbation of a given Frobenius norm."""
    noise = np.random.default_rng(seed).normal(size=weight.shape)
    out: Floats = noise * (norm / np.linalg.norm(noise))
    return out


def perturbed_capture(
    model: nn.Module, layer: int, component: str, error: Floats, ids: Sequence[int]
) -> Scan:
    """Capture with `error` added to one component's weight. The weight is restored afterwards."""
    torch = require("torch")
    weight = component_weight(find_mixers(model)[layer], component)
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.copy_(kept + torch.as_tensor(error).to(kept))
        return capture(model, layer, ids)
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def component_study(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    layers: Sequence[int],
    seeds: Sequence[int] = (0, 1, 2),
    early_late: tuple[int, int] = (8, 32),
) -> list[Object]:
    """Perturb one component of one layer at a time and compare the layer's states (Li, App. N).

    Parameters
    ----------
    model : nn.Module
        Mamba model.
    prompts : sequence of token id sequences
        Prompts. Li, App. N uses 10 of about 100 tokens.
    layers : sequence of int
        Layers to perturb, one at a time.
    seeds : sequence of int
        Seeds of the Gaussian control. Its norm is the median INT4 error over all components and layers.
    early_late : (int, int)
        Token positions of the compared median relative errors.

    Returns
    -------
    list of dict
        An entry for each layer, component and perturbation. `error_norm` is the size of the error. `growth` is the
        ratio of the median relative errors. Each prompt has absolute and relative error and state norm by token.
    """
    late = early_late[1]
    if any(len(p) <= late for p in prompts):
        raise ConfigError(f"prompts need more than {late} tokens; the shortest has {min(map(len, prompts))}")
    mixers = find_mixers(model)
    errors = {
        (layer, name): rounding_error(
            component_weight(mixers[layer], name).detach().double().cpu().numpy(), name
        )
        for layer in layers
        for name in STUDIED
    }
    norm = float(np.median([np.linalg.norm(e) for e in errors.values()]))
    out = []
    for layer in layers:
        reference = [capture(model, layer, ids).states() for ids in prompts]
        for name in STUDIED:
            error = errors[layer, name]
            kinds = [("int4", error)]
            kinds += [(f"gaussian seed {s}", gaussian_error(error, norm, s)) for s in seeds]
            for kind, delta in kinds:
                runs = [
                    diverge(perturbed_capture(model, layer, name, delta, ids).states(), ref)
                    for ids, ref in zip(prompts, reference, strict=True)
                ]
                what = {"layer": layer, "component": name, "perturbation": kind}
                out.append(what | _grown(runs, delta, early_late))
    return out


def _grown(runs: Sequence[Divergence], error: Floats, early_late: tuple[int, int]) -> Object:
    start, end = (float(np.median([r.relative[at] for r in runs])) for at in early_late)
    return {
        "error_norm": float(np.linalg.norm(error)),
        "growth": end / start if start > 0 else None,
        "prompts": [{k: getattr(r, k).tolist() for k in CURVES} for r in runs],
    }


def identity_sweep(
    scans: Sequence[Scan],
    error_norm: float,
    alphas: Sequence[float] = (0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5),
    seeds: Sequence[int] = (0, 1, 2),
) -> list[Object]:
    """Add alpha h_{t-1} to the recurrence and perturb `A_log` by Gaussian noise of a given norm (Li, Table 21).

    Parameters
    ----------
    scans : sequence of Scan
        One per prompt, from `capture`.
    error_norm : float
        Frobenius norm of the noise on `A_log`.
    alphas, seeds
        Coefficients of the identity term, and seeds of the noise.

    Returns
    -------
    list of dict
        An entry per alpha, with medians over prompts and seeds at the last token. `absolute` error and `norm` of the
        states grow with alpha, since slow channels grow without bound, and the `relative` error settles. `by_prompt`
        is the relative error, mean over seeds.
    """
    if not scans:
        raise ConfigError("the sweep needs at least one scan")
    out = []
    for alpha in alphas:
        runs = []
        for scan in scans:
            reference = scan.states(alpha)
            for seed in seeds:
                noisy = scan.A_log + gaussian_error(scan.A_log, error_norm, seed)
                shaken = Scan(scan.x, scan.dt, noisy, scan.B, scan.C, scan.D)
                runs.append(diverge(shaken.states(alpha), reference))
        out.append(
            {
                "alpha": float(alpha),
                **{k: float(np.median([getattr(r, k)[-1] for r in runs])) for k in CURVES},
                "largest_multiplier": float(max(scan.decay().max() for scan in scans) + alpha),
                "by_prompt": np.reshape([r.relative[-1] for r in runs], (len(scans), -1))
                .mean(axis=1)
                .tolist(),
            }
        )
    return out
