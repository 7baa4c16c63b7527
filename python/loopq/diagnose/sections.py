"""The sections of a diagnosis: each takes the context and returns plain data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from loopq.calibrate.data import TokenSet
from loopq.config import PER_CHANNEL, DiagnoseConfig
from loopq.diagnose import overlap, proxy, rank
from loopq.diagnose.hessians import StepHessians
from loopq.diagnose.weights import Matrix, Rounder, input_blocks, quantizable, rounded, weight_of
from loopq.progress import Progress
from loopq.systems.base import LoopedSystem, SharedParameter

if TYPE_CHECKING:
    from loopq.calibrate.collect import Collection, HessianSet
    from loopq.calibrate.dump import Dump
    from loopq.calibrate.select import Selection

# Input groups whose Hessians are there together, and how to get one.
Pass = tuple[list[str], Callable[[str], StepHessians]]

# Above this width the rank is counted at a few steps only: an eigenvalue problem of 10,560 takes minutes.
_MAX_DIM_ALL_STEPS = 2048

LOOP_SECTIONS = {
    "overlap": "the overlap of states",
    "feedback": "the feedback intervention",
    "displacement": "the displacement rollout",
    "jacobian": "the Jacobian of a step",
    "bypass": "the identity bypass",
}
EXPOSED_SECTIONS = ("perturbation", "bypass")
COMPARING_SECTIONS = ("ablation", "arms", "feedback", "groups", "perturbation")


@dataclass
class Context:
    """What every section works on."""

    system: LoopedSystem
    tokens: TokenSet
    n_steps: int
    config: DiagnoseConfig
    rounder: Rounder
    progress: Progress
    train: TokenSet | None = None
    memory: int | None = None
    threads: int = 0

    @cached_property
    def parameters(self) -> tuple[SharedParameter, ...]:
        """Shared parameters at this depth."""
        return self.system.shared_parameters(self.n_steps)

    @cached_property
    def exposed(self) -> list[SharedParameter]:
        """Feedback-exposed layers."""
        return [p for p in self.parameters if p.exposed]

    @cached_property
    def selection(self) -> Selection:
        """Layers that are observed, and who shares inputs."""
        from loopq.calibrate.select import select

        return select(self.system, self.tokens, n_steps=self.n_steps, seed=self.config.seed)

    @cached_property
    def job(self) -> Collection:
        """Collection of the per-step Hessians."""
        from loopq.calibrate.collect import Collection

        return Collection(self.system, self.tokens, self.selection, self.config.batch_size, self.config.seed)

    @cached_property
    def prompts(self) -> TokenSet:
        """Prompts of the runs that compare weights."""
        return self.tokens.take(0, self.config.n_prompts)

    def fingerprint(self) -> str:
        """Identity of weights, prompts and depth."""
        return self.job.fingerprint("diagnosis")

    def rounded_exposed(self, group_size: int) -> dict[str, Matrix]:
        """Rounded weights of the exposed layers, or of all where none is exposed."""
        chosen = self.exposed or quantizable(self.parameters)
        return rounded(self.system, chosen, self.config.layer(group_size), self.rounder)

    def shared(self) -> dict[str, Any]:
        """Keywords that the runs have in common."""
        return {
            "rounder": self.rounder,
            "batch_size": self.config.batch_size,
            "progress": self.progress,
        }

    def sums(self) -> HessianSet:
        """Accumulators of every input group, each step apart, still empty."""
        from loopq.calibrate.collect import HessianSet

        steps = {p.name: list(range(p.invocations)) for p in self.selection.input_groups}
        return HessianSet(self.job, steps, per_step=True, threads=self.threads)


def steps_to_count(n_steps: int, dim: int) -> list[int]:
    """Steps whose rank is counted: all of a narrow layer, a few of a wide one."""
    if dim <= _MAX_DIM_ALL_STEPS:
        return list(range(n_steps))
    return sorted({0, 1, n_steps // 8, n_steps // 4, n_steps // 2, n_steps - 1} & set(range(n_steps)))


def ranks(context: Context) -> dict[str, Any]:
    """Ranks, spectra, proxies and magnitudes of every observed input (Li, Tables 1, 18, 19 and 22)."""
    sums = context.sums()

    def one(leader: str) -> StepHessians:
        return sums.accumulators.pop(leader)  # type: ignore[return-value]

    def passes() -> Iterator[Pass]:
        for leaders in sums.passes(context.memory):
            sums.run_pass(leaders, progress=context.progress, label="hessians")
            yield leaders, one

    def weight(p: SharedParameter) -> Matrix:
        return weight_of(context.system, p)

    return _ranks(
        context.selection.observed,
        context.selection.leaders,
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
    """The same from a dump."""
    from loopq.quantizers.solve import oriented

    m = dump.manifest
    leaders = {p.name: m.leaders[p.name] for p in m.parameters if p.name in m.leaders}

    def one(leader: str) -> StepHessians:
        steps = sorted(m.rows[leader])
        return dump.accumulator(leader, steps, per_step=True, threads=threads)  # type: ignore[return-value]

    def weight(p: SharedParameter) -> Matrix:
        return oriented(dump.weight(p), p)

    observed = [p for p in m.parameters if p.name in leaders]
    return _ranks(observed, leaders, [(list(m.rows), one)], weight, config, rounder, threads, progress)


def _ranks(
    observed: Sequence[SharedParameter],
    leaders: Mapping[str, str],
    passes: Iterable[Pass],
    weight: Callable[[SharedParameter], Matrix],
    config: DiagnoseConfig,
    rounder: Rounder,
    threads: int,
    progress: Progress,
) -> dict[str, Any]:
    by_name = {p.name: p for p in observed}
    layers: dict[str, Any] = {}
    magnitudes: dict[str, Any] = {}
    proxies: dict[str, Any] = {}
    per_channel: dict[str, Any] = {}
    for group, one in passes:
        progress.start("ranks", len(group), "inputs")
        for leader in group:
            h = one(leader)
            count = steps_to_count(len(list(h.steps)), h.dim)
            layers[leader] = rank.layer_ranks(
                h, input_blocks(by_name[leader]), damping=config.damping, steps=count, threads=threads
            )
            magnitudes[leader] = proxy.magnitude_stability(h)
            for p in observed:
                if leaders[p.name] == leader:
                    w = weight(p)
                    for g, into in ((config.group_size, proxies), (PER_CHANNEL, per_channel)):
                        into[p.name] = proxy.step_proxies(rounder(w, config.layer(g)) - w, h)
            progress.advance()
        progress.stop()
    return {
        "threshold": rank.FOCAL,
        "leaders": dict(leaders),
        "layers": layers,
        "magnitudes": magnitudes,
        "bottleneck": rank.bottleneck(layers),
        "largest_gain": rank.largest_gain(layers),
        "traces": {name: layers[leaders[name]]["all"]["trace"] for name in by_name},
        "proxies": {name: values.tolist() for name, values in proxies.items()},
        "proxy_sum": {
            "grouped": _proxy_sum(proxies),
            "per channel": _proxy_sum(per_channel),
        },
    }


def _proxy_sum(per_layer: Mapping[str, Any]) -> dict[str, Any]:
    """Sum over the layers of the most common number of steps; the others are named."""
    lengths = [len(v) for v in per_layer.values()]
    usual = max(set(lengths), key=lengths.count)
    used = {name: v for name, v in per_layer.items() if len(v) == usual}
    return proxy.summarise_proxies(used) | {"left_out": sorted(set(per_layer) - set(used))}


def overlaps(context: Context) -> dict[str, Any]:
    """Overlap of state subspaces between steps and seeds, and the exposed layers' output size (Li, App. O)."""
    from loopq.diagnose.exposure import adapter_output_ratio

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
    from loopq.diagnose import sensitivity

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
    from loopq.calibrate.hooks import Observer

    total: dict[str, float] = {}

    def add(p: SharedParameter, step: int, rows: Any) -> None:
        total[p.name] = total.get(p.name, 0.0) + float(rows.double().square().sum())

    with Observer(context.system, context.selection.observed, add) as observer:
        for batch in tokens.batches(context.config.batch_size, context.config.seed):
            with observer.rollout(batch):
                context.system.rollout(batch, context.n_steps)
    return total


def arms(context: Context) -> dict[str, Any]:
    """Controlled injection, per channel and grouped (Li, Table 3)."""
    from loopq.diagnose import exposure

    config = context.config
    out: dict[str, Any] = {}
    for name, g in (("per channel", PER_CHANNEL), ("grouped", config.group_size)):
        out[name] = exposure.controlled_injection(
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
    from loopq.diagnose import exposure

    config = context.config
    rows = exposure.group_size_sweep(
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
    """Feedback intervention on the exposed layers, whole and split by input block, or on all (Li, App. E)."""
    from loopq.diagnose.feedback import feedback_study

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
    """Displacement from the reference's final state (Li, App. L)."""
    from loopq.diagnose.displacement import displacement

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
    from loopq.diagnose.perturbation import perturbation_study

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
    """Spectral radius and norm of the step, and what the identity bypass does to them (Li, App. K)."""
    from loopq.diagnose.spectral import radius_study

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
    from loopq.diagnose.bypass import bypass_study

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
    from loopq.diagnose.stepmap import Bypass
    from loopq.errors import ConfigError

    try:
        Bypass(context.system, context.n_steps)
    except ConfigError:
        return False
    return True


SECTIONS: dict[str, Callable[[Context], dict[str, Any]]] = {
    "ranks": ranks,
    "overlap": overlaps,
    "ablation": ablation,
    "arms": arms,
    "feedback": feedback,
    "groups": groups,
    "displacement": displacements,
    "perturbation": perturbations,
    "jacobian": jacobian,
    "bypass": bypasses,
}


def estimate(context: Context, run: Sequence[str]) -> dict[str, Any]:
    """What the sections will take, from a timed batch of rollouts, a timed step and one timed eigenvalue problem.

    Returns
    -------
    dict
        `seconds` in all, `n_prompt_rollouts`, `hessian_bytes`, and `sections`: rollouts and seconds of each.
    """
    config, system = context.config, context.system
    rollout, step = _time_rollout(context)
    prompts = len(context.prompts.sequences)
    n_ablation = min(config.n_ablation_prompts, len(context.tokens.sequences))
    n_jacobian = min(config.n_jacobian_prompts, len(context.tokens.sequences))
    seeds = len(config.seeds) if system.state_is_random else 1
    n_layers = len(quantizable(context.parameters))
    arms_run = (5 if context.exposed else 2) + 1
    rollouts = {
        "ranks": len(context.tokens.sequences),
        "overlap": len(context.tokens.sequences) * (2 if system.state_is_random else 1),
        "ablation": n_ablation * (2 * n_layers + 4),
        "arms": prompts * arms_run * (2 if system.state_is_random else 1) * 2,
        "feedback": prompts * seeds * 2 * 3 * (len(config.lambdas) + 1),
        "groups": prompts * (len(config.group_sizes) + 1),
        "displacement": prompts * 3 * 2,
        "perturbation": prompts * (4 * len(config.seeds) + 1)
        + (6 * config.n_updates if context.train else 0),
    }
    maps = 8 if context.exposed else 2
    # About 300 products for a start vector and 60 for the norm, each worth two steps; a map with many
    # eigenvalues of one size takes up to the cap. Directions of the bypass run as one batch, at half the price.
    extra = {
        "ranks": _eigen_seconds(context),
        "jacobian": n_jacobian * maps * (2 * 300 + 60) * 2 * step,
        "bypass": n_jacobian * seeds * 2 * 4 * len(config.radii) * config.n_directions * step,
    }
    parts = {
        name: {
            "n_prompt_rollouts": rollouts.get(name, 0),
            "seconds": rollouts.get(name, 0) * rollout + extra.get(name, 0.0),
        }
        for name in run
    }
    return {
        "seconds": sum(p["seconds"] for p in parts.values()),
        "n_prompt_rollouts": sum(p["n_prompt_rollouts"] for p in parts.values()),
        "seconds_per_rollout": rollout,
        "hessian_bytes": _hessian_bytes(context) if "ranks" in run else 0,
        "sections": parts,
    }


def _time_rollout(context: Context) -> tuple[float, float]:
    """Seconds of a prompt's rollout within a batch, and of one step of a prompt alone; warmed up."""
    from loopq.diagnose.rollouts import trace

    system, n, config = context.system, context.n_steps, context.config

    def timed(n_prompts: int, read: tuple[int, ...] | None) -> float:
        batch = next(context.tokens.take(0, n_prompts).batches(n_prompts, config.seed))
        seconds = 0.0
        for _ in range(2):
            began = time.monotonic()
            trace(system, batch, n, read)
            seconds = time.monotonic() - began
        return seconds

    together = min(config.batch_size, len(context.tokens.sequences))
    return timed(together, None) / together, timed(1, (n,)) / n


def _eigen_seconds(context: Context) -> float:
    """Seconds of all eigenvalue problems, scaled by the cube of the width from a timed one."""
    probe = 256
    h = np.eye(probe)
    began = time.monotonic()
    rank.spectrum(h, context.threads)
    unit = (time.monotonic() - began) / probe**3
    total = 0.0
    for p in context.selection.input_groups:
        # The blocks of a concatenated input are solved too.
        share = 1.25 if input_blocks(p) else 1.0
        total += share * unit * p.in_features**3 * (len(steps_to_count(p.invocations, p.in_features)) + 1)
    return total


def _hessian_bytes(context: Context) -> int:
    sums = context.sums()
    passes = sums.passes(context.memory)
    return max((sum(sums.n_bytes(leader) for leader in leaders) for leaders in passes), default=0)
