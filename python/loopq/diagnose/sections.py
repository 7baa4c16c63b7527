"""The sections of a diagnosis: each takes the context and returns plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from loopq.calibrate.data import TokenSet
from loopq.calibrate.dump import Dump
from loopq.calibrate.hessians import StepHessians
from loopq.calibrate.hooks import Observer
from loopq.diagnose import overlap, proxy, rank, sensitivity
from loopq.diagnose.blindness import solved_losses
from loopq.diagnose.bypass import bypass_study
from loopq.diagnose.config import DiagnoseConfig
from loopq.diagnose.context import Context
from loopq.diagnose.displacement import displacement
from loopq.diagnose.exposure import adapter_output_ratio, controlled_injection, group_size_sweep
from loopq.diagnose.feedback import feedback_study
from loopq.diagnose.perturbation import perturbation_study
from loopq.diagnose.spectral import radius_study
from loopq.diagnose.stepmap import Bypass
from loopq.diagnose.weights import Matrix, Rounder, input_blocks, quantizable, weight_of
from loopq.errors import ConfigError
from loopq.layers.grid import PER_CHANNEL
from loopq.systems.base import SharedParameter
from loopq.terminal.progress import Progress

# Input groups whose Hessians are in memory together, and a function that returns those of one group.
Pass = tuple[list[str], Callable[[str], StepHessians]]

LOOP_SECTIONS = {
    "overlap": "the overlap of states",
    "feedback": "the feedback intervention",
    "displacement": "the displacement rollout",
    "jacobian": "the Jacobian of a step",
    "bypass": "the identity bypass",
}
EXPOSED_SECTIONS = ("perturbation", "bypass")
COMPARING_SECTIONS = ("ablation", "injection", "feedback", "groups", "perturbation")


def ranks(context: Context) -> dict[str, Any]:
    """Ranks, spectra, proxies and magnitudes of every observed input (Li, Tables 1, 18, 19 and 22)."""
    sums = context.sums()

    def take(name: str) -> StepHessians:
        return sums.accumulators.pop(name)

    def passes() -> Iterator[Pass]:
        for names in sums.passes():
            sums.run_pass(names, label="hessians")
            yield names, take

    def weight(p: SharedParameter) -> Matrix:
        return weight_of(context.system, p)

    return _ranks(
        context.selection.observed,
        context.selection.input_groups,
        passes(),
        weight,
        context.config,
        context.rounder,
        context.threads,
        context.progress,
    )


def dump_ranks(
    dump: Dump, config: DiagnoseConfig, rounder: Rounder, threads: int, progress: Progress
) -> dict[str, Any]:
    """The same, from a calibration dump."""
    m = dump.manifest
    weights = dump.weights()
    groups = {p.name: m.input_groups[p.name] for p in m.parameters if p.name in m.input_groups}

    def take(name: str) -> StepHessians:
        steps = sorted(m.rows[name])
        return dump.accumulator(name, steps, per_step=True)

    def weight(p: SharedParameter) -> Matrix:
        return weights.oriented(p)

    observed = [p for p in m.parameters if p.name in groups]
    return _ranks(observed, groups, [(list(m.rows), take)], weight, config, rounder, threads, progress)


def _ranks(
    observed: Sequence[SharedParameter],
    input_groups: Mapping[str, str],
    passes: Iterable[Pass],
    weight: Callable[[SharedParameter], Matrix],
    config: DiagnoseConfig,
    rounder: Rounder,
    threads: int,
    progress: Progress,
) -> dict[str, Any]:
    by_name = {p.name: p for p in observed}
    exposed = [input_groups[p.name] for p in observed if p.exposed]
    layers: dict[str, Any] = {}
    magnitudes: dict[str, Any] = {}
    proxies: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    per_channel: dict[str, Any] = {}
    losses: dict[str, Any] = {}
    for names, take in passes:
        progress.start("ranks", len(names), "inputs")
        for name in names:
            h = take(name)
            if not any(map(h.n_rows, h.steps)):  # an expert that no token was sent to
                progress.advance()
                continue
            count = rank.steps_to_count(len(list(h.steps)), h.dim)
            layers[name] = rank.layer_ranks(h, input_blocks(by_name[name]), count, threads)
            drawn = rank.drawn(layers, exposed)
            if name in drawn:
                layers[name]["spectra"] = rank.layer_spectra(h, damping=config.damping, threads=threads)
            for other in layers.keys() - set(drawn):
                layers[other].pop("spectra", None)
            magnitudes[name] = proxy.magnitude_stability(h)
            for p in observed:
                if input_groups[p.name] == name:
                    w = weight(p)
                    outputs[p.name] = proxy.step_proxies(w, h, threads)
                    for g, into in ((config.group_size, proxies), (PER_CHANNEL, per_channel)):
                        into[p.name] = proxy.step_proxies(rounder(w, config.layer(g)) - w, h, threads)
                    # Li, Table 25: the adapter is damped ten times as much.
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
        "proxy_sum": {
            "grouped": _proxy_sum(proxies),
            "per channel": _proxy_sum(per_channel),
        },
    }


def _proxy_sum(per_layer: Mapping[str, Any]) -> dict[str, Any]:
    """Sum over the layers with the most common number of steps; `left_out` names the others."""
    lengths = [len(v) for v in per_layer.values()]
    usual = max(set(lengths), key=lengths.count)
    used = {name: v for name, v in per_layer.items() if len(v) == usual}
    return proxy.summarise_proxies(used) | {"left_out": sorted(set(per_layer) - set(used))}


def overlaps(context: Context) -> dict[str, Any]:
    """Overlap of state subspaces between steps and seeds, and the exposed layers' output size (Li, App. O)."""
    config = context.config
    seeds = (config.seed, config.seed + 1) if context.system.state_is_random else (config.seed,)
    steps = sorted({0, context.n_steps - 1})
    moments = {
        seed: overlap.state_moments(
            context.system, context.tokens, context.n_steps, steps, seed, config.batch_size
        )
        for seed in seeds
    }
    ratio = {}
    if context.exposed:
        ratio = adapter_output_ratio(
            context.system, context.prompts, context.n_steps, seed=config.seed, batch_size=config.batch_size
        )
    return {"overlaps": overlap.subspace_survey(moments), "output_ratio": ratio}


def ablation(context: Context) -> dict[str, Any]:
    """Single-layer ablation, random-direction gain and Hessian trace, side by side (Li, Table 16)."""
    config = context.config
    tokens = context.tokens.take(0, config.n_ablation_prompts)
    chosen = quantizable(context.parameters)

    def rounded_alone(group_size: int) -> dict[str, dict[str, float | None]]:
        return sensitivity.ablation(
            context.system,
            tokens,
            context.n_steps,
            config.layer(group_size),
            parameters=chosen,
            seed=config.seed,
            **context.shared(),
        )

    found, whole = rounded_alone(config.group_size), rounded_alone(PER_CHANNEL)
    # Li, App. G perturbs the inputs of step 16 of 32.
    middle = context.system.check_depth(max(1, context.n_steps // 2))
    weights = {p.name: weight_of(context.system, p) for p in chosen}
    gain = sensitivity.gains(context.system, tokens, middle, weights=weights, seed=config.seed)
    trace = _input_energy(context, tokens)
    key = "changed" if context.system.output == "logits" else "output_error"
    measures: dict[str, dict[str, float | None]] = {
        "ablation": {name: values[key] for name, values in found.items()},
        "ablation per channel": {name: values[key] for name, values in whole.items()},
        "random-direction gain": {name: gain.get(name) for name in found},
        "Hessian trace": {name: trace.get(name) for name in found},
    }
    return {
        "measure": key,
        "layers": {
            name: values | {"gain": gain.get(name), "trace": trace.get(name), "per_channel": whole[name]}
            for name, values in found.items()
        },
        "table": sensitivity.rank_table(measures, "ablation"),
        "n_prompts": len(tokens.sequences),
    }


def _input_energy(context: Context, tokens: TokenSet) -> dict[str, float]:
    """tr(X^T X) of each observed layer over all steps: the sum of its squared inputs (Li, App. G)."""
    total: dict[str, float] = {}

    def add(p: SharedParameter, step: int, rows: Any) -> None:
        total[p.name] = total.get(p.name, 0.0) + float(rows.double().square().sum())

    with Observer(context.system, context.selection.observed, add) as observer:
        for batch in tokens.batches(context.config.batch_size, context.config.seed):
            with observer.rollout(batch):
                context.system.rollout(batch, context.n_steps)
    return total


def injection(context: Context) -> dict[str, Any]:
    """Controlled injection, per channel and grouped (Li, Table 3)."""
    config = context.config
    out: dict[str, Any] = {}
    for name, g in (("per channel", PER_CHANNEL), ("grouped", config.group_size)):
        out[name] = controlled_injection(
            context.system,
            context.prompts,
            context.n_steps,
            config.layer(g),
            seed=config.seed,
            **context.shared(),
        )
    return out


def groups(context: Context) -> dict[str, Any]:
    """Group-size sweep of the whole loop (Li, Table 17)."""
    config = context.config
    rows = group_size_sweep(
        context.system,
        context.prompts,
        context.n_steps,
        config.layer(config.group_size),
        config.group_sizes,
        seed=config.seed,
        **context.shared(),
    )
    return {"rows": rows}


def feedback(context: Context) -> dict[str, Any]:
    """Feedback intervention on the exposed layers, whole and by input block, or on all layers (Li, App. E)."""
    config = context.config
    settings = {"per channel": config.layer(PER_CHANNEL), "grouped": config.layer(config.group_size)}
    found = feedback_study(
        context.system,
        context.prompts,
        context.n_steps,
        settings,
        lambdas=config.lambdas,
        seeds=config.seeds,
        **context.shared(),
    )
    return {"settings": found, "layers": [p.name for p in context.exposed] or "all"}


def displacements(context: Context) -> dict[str, Any]:
    """Displacement from the final state of full precision (Li, App. L)."""
    config = context.config
    out = {}
    for name, g in (("per channel", PER_CHANNEL), ("grouped", config.group_size)):
        out[name] = displacement(
            context.system,
            context.prompts,
            context.n_steps,
            context.rounded_exposed(g),
            seed=config.seed,
            batch_size=config.batch_size,
            progress=context.progress,
        ).to_json()
    return {"settings": out, "layers": [p.name for p in context.exposed] or "all"}


def perturbations(context: Context) -> dict[str, Any]:
    """Rank-4 updates and output-matched noise at the exposed layers and in the core (Li, Table 15)."""
    config = context.config
    return perturbation_study(
        context.system,
        context.prompts,
        context.n_steps,
        config.layer(PER_CHANNEL),
        train=context.train,
        seeds=config.seeds,
        n_updates=config.n_updates,
        **context.shared(),
    )


def jacobian(context: Context) -> dict[str, Any]:
    """Spectral radius and norm of the step, with and without the identity bypass (Li, App. K)."""
    tokens = context.tokens.take(0, context.config.n_jacobian_prompts)
    return radius_study(
        context.system,
        tokens,
        context.n_steps,
        context.rounded_exposed(PER_CHANNEL),
        with_bypass=_has_bypass(context),
        seed=context.config.seed,
        progress=context.progress,
    )


def bypasses(context: Context) -> dict[str, Any]:
    """Identity-bypass control (Li, App. K)."""
    config = context.config
    return bypass_study(
        context.system,
        context.tokens.take(0, config.n_jacobian_prompts),
        context.n_steps,
        context.rounded_exposed(PER_CHANNEL),
        radii=config.radii,
        n_directions=config.n_directions,
        seeds=config.seeds,
        progress=context.progress,
    )


def _has_bypass(context: Context) -> bool:
    try:
        Bypass(context.system, context.n_steps)
    except ConfigError:
        return False
    return True


SECTIONS: dict[str, Callable[[Context], dict[str, Any]]] = {
    "ranks": ranks,
    "overlap": overlaps,
    "ablation": ablation,
    "injection": injection,
    "feedback": feedback,
    "groups": groups,
    "displacement": displacements,
    "perturbation": perturbations,
    "jacobian": jacobian,
    "bypass": bypasses,
}
