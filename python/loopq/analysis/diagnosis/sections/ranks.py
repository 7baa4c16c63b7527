"""Input Hessians of a diagnosis: their ranks and spectra, with the proxies and magnitudes of the layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.analysis.diagnosis import rank
from loopq.analysis.diagnosis.blindness import solved_losses
from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.sections import SECTIONS, Section
from loopq.analysis.diagnosis.weights import Matrix, Rounder, core_rounder, input_blocks, weight_of
from loopq.calibrate.dump import Dump
from loopq.calibrate.hessians import StepHessians
from loopq.errors import ConfigError
from loopq.evaluation.stats import pearson
from loopq.layers.grid import PER_CHANNEL
from loopq.layers.shared import SharedParameter
from loopq.settings.execution import Execution
from loopq.storage.schema import Object

Floats = NDArray[np.float64]


def step_proxies(error: NDArray[np.float32], hessians: StepHessians, threads: int = 0) -> Floats:
    """Reconstruction proxy tr(dW H_t dW^T) of every step, one term of Li, Eq. 3 each.

    Parameters
    ----------
    error : float32 ndarray of shape (out_features, in_features)
        dW = W^ - W.
    hessians : StepHessians
        H_t of the layer's input.
    threads : int
        Threads of the core; 0 takes all cores.

    Returns
    -------
    ndarray, float64, shape (n_steps,)
    """
    return np.array([native.proxy(error, None, hessians.matrix([t]), threads) for t in hessians.steps])


def summarise_proxies(per_layer: Mapping[str, Floats]) -> Object:
    """Sum per-step proxies over layers (Li, App. J).

    Parameters
    ----------
    per_layer : mapping of str to ndarray, shape (n_steps,)
        `step_proxies` of each layer. All layers have the same depth.

    Returns
    -------
    dict
        `per_step`, `max_over_min` and `step0_share`. `uniform_share` is 1/N.
    """
    lengths = {len(v) for v in per_layer.values()}
    if len(lengths) != 1:
        raise ConfigError(f"only layers with the same number of steps can be summed; got {sorted(lengths)}")
    total = np.sum(list(per_layer.values()), axis=0)
    low = float(total.min())
    return {
        "per_step": total.tolist(),
        "max_over_min": float(total.max()) / low if low > 0 else None,
        "step0_share": float(total[0] / total.sum()) if total.sum() > 0 else None,
        "uniform_share": 1.0 / len(total),
    }


def channel_rms(hessian: Floats, n_rows: int) -> Floats:
    """Root mean square of each input channel, float64, shape (dim,)."""
    rms: Floats = np.sqrt(np.maximum(np.diag(hessian), 0.0) / max(n_rows, 1))
    return rms


def magnitude_stability(hessians: StepHessians) -> Object:
    """Pearson correlation of channel magnitudes between the first step and each later one (Li, Sec. 4).

    Magnitudes are root mean squares from the Hessian's diagonal. None where a side is constant.
    """
    steps: Sequence[int] = list(hessians.steps)
    rms = {t: channel_rms(hessians.matrix([t]), hessians.n_rows(t)) for t in steps}
    correlations = [pearson(rms[steps[0]], rms[t]) for t in steps]
    clean = [None if np.isnan(r) else r for r in correlations]
    return {"per_step": clean, "first_last": clean[-1], "magnitude": "root mean square of each input channel"}


# Input groups with their Hessians in memory together, and a function that returns the Hessians of one group.
Pass = tuple[list[str], Callable[[str], StepHessians]]

# Width of the timed matrix, and number of inputs with spectra. These are the drawn inputs and some that had the lowest
# rank or the largest gain until another one was found.
_PROBE = 1024
_DRAWN = 6


@dataclass(frozen=True)
class _Inputs:
    """Inputs of the rank counts.

    Parameters
    ----------
    observed : sequence of SharedParameter
        Layers.
    input_groups : mapping of str to str
        Maps each layer to a layer. That one represents its input.
    passes : iterable of Pass
        Hessians of the inputs.
    weight : callable
        Returns a layer's weight, (out_features, in_features).
    """

    observed: Sequence[SharedParameter]
    input_groups: Mapping[str, str]
    passes: Iterable[Pass]
    weight: Callable[[SharedParameter], Matrix]


def ranks(context: Context) -> Object:
    """Measure ranks, spectra, proxies and magnitudes of all observed inputs (Li, Tables 1, 18, 19 and 22)."""
    sums = context.sums()

    def take(name: str) -> StepHessians:
        return sums.accumulators.pop(name)

    def passes() -> Iterator[Pass]:
        for names in sums.passes():
            sums.run_pass(names, label="hessians")
            yield names, take

    def weight(p: SharedParameter) -> Matrix:
        return weight_of(context.system, p)

    inputs = _Inputs(context.selection.observed, context.selection.input_groups, passes(), weight)
    return _ranks(inputs, context.config, context.rounder, context.execution)


def dump_ranks(dump: Dump, config: DiagnoseConfig, execution: Execution) -> Object:
    """The same measurements from a calibration dump."""
    m = dump.manifest
    weights = dump.weights()
    groups = {p.name: m.input_groups[p.name] for p in m.parameters if p.name in m.input_groups}

    def take(name: str) -> StepHessians:
        steps = sorted(m.rows[name])
        return dump.accumulator(name, steps, per_step=True)

    def weight(p: SharedParameter) -> Matrix:
        return weights.oriented(p)

    observed = [p for p in m.parameters if p.name in groups]
    inputs = _Inputs(observed, groups, [(list(m.rows), take)], weight)
    return _ranks(inputs, config, core_rounder, execution)


def _ranks(inputs: _Inputs, config: DiagnoseConfig, rounder: Rounder, execution: Execution) -> Object:
    observed, input_groups = inputs.observed, inputs.input_groups
    threads, progress = execution.threads, execution.progress
    by_name = {p.name: p for p in observed}
    exposed = [input_groups[p.name] for p in observed if p.exposed]
    layers: Object = {}
    magnitudes: Object = {}
    proxies: Object = {}
    outputs: Object = {}
    per_channel: Object = {}
    losses: Object = {}
    for names, take in inputs.passes:
        progress.start("ranks", len(names), "inputs")
        for name in names:
            h = take(name)
            if not any(map(h.n_rows, h.steps)):  # no token was routed to this expert
                progress.advance()
                continue
            count = rank.steps_to_count(len(list(h.steps)), h.dim)
            layers[name] = rank.layer_ranks(h, input_blocks(by_name[name]), count, threads)
            drawn = rank.drawn(layers, exposed)
            if name in drawn:
                layers[name]["spectra"] = rank.layer_spectra(h, damping=config.damping, threads=threads)
            for other in layers.keys() - set(drawn):
                layers[other].pop("spectra", None)
            magnitudes[name] = magnitude_stability(h)
            for p in observed:
                if input_groups[p.name] == name:
                    w = inputs.weight(p)
                    outputs[p.name] = step_proxies(w, h, threads)
                    for g, into in ((config.group_size, proxies), (PER_CHANNEL, per_channel)):
                        into[p.name] = step_proxies(rounder(w, config.layer(g)) - w, h, threads)
                    # Li, Table 25: the adapter gets ten times the damping.
                    damping = config.damping * (10 if p.role == "adapter" else 1)
                    grouped = config.layer(config.group_size)
                    losses[p.name] = solved_losses(w, h, grouped, damping, rounder, threads)
            progress.advance()
        progress.stop()
    return {
        "threshold": rank.FOCAL,
        "input_groups": dict(input_groups),
        "layers": layers,
        "magnitudes": magnitudes,
        "bottleneck": rank.bottleneck(layers),
        "largest_gain": rank.largest_gain(layers),
        "drawn": rank.drawn(layers, exposed),
        "traces": {
            name: layers[input_groups[name]]["all"]["trace"]
            for name in by_name
            if input_groups[name] in layers
        },
        "solved": losses,
        "proxies": {name: values.tolist() for name, values in proxies.items()},
        "outputs": {name: values.tolist() for name, values in outputs.items()},
        "proxy_sum": {"grouped": _proxy_sum(proxies), "per channel": _proxy_sum(per_channel)},
    }


def _proxy_sum(per_layer: Mapping[str, Any]) -> Object:
    """Sum over the layers with the most common number of steps; `left_out` names the others."""
    lengths = [len(v) for v in per_layer.values()]
    usual = max(set(lengths), key=lengths.count)
    used = {name: v for name, v in per_layer.items() if len(v) == usual}
    return summarise_proxies(used) | {"left_out": sorted(set(per_layer) - set(used))}


def _seconds(context: Context, step: float) -> float:
    """Seconds of all counts and drawn spectra: one of each is timed and scaled by the cube of the width."""
    groups = context.selection.distinct_inputs
    probe = min(_PROBE, max((p.in_features for p in groups), default=1))
    h = np.eye(probe)

    def unit(run: Callable[..., object]) -> float:
        began = time.monotonic()
        run(h, threads=context.execution.threads)
        return (time.monotonic() - began) / probe**3

    per_count, per_spectrum = unit(rank.count), unit(rank.spectrum)
    total = 0.0
    for p in groups:
        # The two blocks of a concatenated input are counted too, each at an eighth of the cost.
        share = 1.25 if input_blocks(p) else 1.0
        counted = len(rank.steps_to_count(p.invocations, p.in_features)) + 1
        total += share * per_count * p.in_features**3 * counted
        total += 3 * per_spectrum * p.in_features**3 * min(1.0, _DRAWN / len(groups))
    return total


SECTIONS.register("ranks")(
    Section(ranks, 10, rollouts=lambda context: len(context.tokens.sequences), seconds=_seconds)
)
