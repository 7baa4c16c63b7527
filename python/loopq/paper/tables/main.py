"""Li, Table 2: the main table, with intervals over prompts and over calibration seeds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.errors import ConfigError
from loopq.evaluation.compare import Measurement, compare
from loopq.paper import main_text
from loopq.paper.bench import Bench
from loopq.paper.compared import three
from loopq.paper.main_text import ALL, GRIDS, ONE, RTN
from loopq.paper.models import PreparedModel, Sizes
from loopq.paper.plbert import PLBERT
from loopq.paper.probe import MASK_ID, MASK_SHARE, fit_probe, measure_states
from loopq.paper.scatter import gain_scatter
from loopq.paper.shown import TABLES, Found, PaperTable, Shown
from loopq.paper.tables.rank_survey import rank_survey
from loopq.storage.schema import Object
from loopq.systems.stepwise import steps_of

#: Prompts of PL-BERT, whose rollout costs thirty times as much.
FEWER = {"n_calibration": 32, "n_evaluation": 24}
#: Prompts for fitting the probe.
N_PROBE = 96

Weights = dict[str, NDArray[np.float32]]


def measure(bench: Bench) -> Object:
    """Quantize into the three variants on two grids, from several sets of calibration prompts.

    Returns
    -------
    dict
        `model`, `system`, `n_steps` and `output` identify the run. `looped` tells whether any calibrated weight is
        called more than once. `full_precision` is the negative log-likelihood in nats by prompt, null for hidden
        states. `variants` has the bytes for each grid and variant. It lists KL, agreement and negative log-likelihood
        by calibration seed and prompt (for hidden states squared relative error, cosine and null). `ranks` comes from
        `rank_survey`. `states` comes from `loopq.paper.probe.measure_states` and is null without hidden states
        by step.
    """
    s = bench.settings.changed(**(FEWER if bench.source.name == PLBERT else {}))
    sizes = Sizes(s.n_calibration * s.n_seeds, N_PROBE, s.n_evaluation, s.seq_len)
    model, began = bench.prompts or bench.source.prompts(sizes), time.monotonic()
    weights: dict[str, Weights] = {}
    n_bytes: dict[str, int] = {}
    facts: Object = {}
    for one in _seeds(bench, model, s.n_seeds):
        selection = one.collected.job.selection
        for (bits, group, variant), layers in _solve(one).items():
            name = _name(bits, group, variant, one.execution.seed)
            n_bytes[name] = sum(layer.n_bytes for layer in layers.values())
            weights[name] = {n: layer.in_model_orientation() for n, layer in layers.items()}
        if not facts:
            facts["looped"] = any(p.invocations > 1 for p in selection.observed)
            facts["ranks"] = rank_survey(one.sums, selection, bench.execution.threads)
    measured = compare(
        bench.system,
        weights,
        model.evaluation,
        n_steps=bench.n_steps,
        count_bytes=bench.source.loaded.count_bytes,
        execution=bench.execution,
    )
    of = {m.name: m for m in measured}
    names = {(b, g, v): _names(b, g, v, s.n_seeds) for b, g in GRIDS for v in (RTN, ONE, ALL)}
    return (
        bench.head()
        | facts
        | {
            "system": bench.system.name,
            "task": model.task,
            "bytes_per_token": measured[0].bytes_per_token,
            "full_precision": _rounded(measured[0].nll) if bench.system.output == "logits" else None,
            "variants": [
                {"bits": b, "group_size": g, "variant": v, "n_bytes": n_bytes[by_seed[0]]}
                | _by_seed([of[name] for name in by_seed])
                for (b, g, v), by_seed in names.items()
            ],
            "states": _states(bench, model, weights),
            "settings": s.to_json(),
            "seconds": round(time.monotonic() - began, 1),
        }
    )


def _seeds(bench: Bench, model: PreparedModel, n_seeds: int) -> Iterator[Bench]:
    """The bench with the calibration prompts and initial states of each seed."""
    text = model.calibration
    each = len(text.sequences) // n_seeds
    if each < 1:
        raise ConfigError(
            f"{text.source}: {len(text.sequences)} prompts are too few for {n_seeds} seeds; each needs at least one"
        )
    for seed in range(n_seeds):
        prompts = dataclasses.replace(model, calibration=text.take(seed * each, (seed + 1) * each))
        yield dataclasses.replace(bench, prompts=prompts, execution=bench.execution.changed(seed=seed))


def _solve(bench: Bench) -> dict[tuple[int, int, str], Any]:
    """Layers of every grid and variant from one calibration set. Rounding needs none and is done once."""
    return {
        (bits, group, name): bench.solve(config)
        for bits, group in GRIDS
        for name, config in zip(
            (RTN, ONE, ALL), three(bench, bits=bits, group_size=group).values(), strict=True
        )
        if name != RTN or not bench.execution.seed
    }


def _name(bits: int, group: int, variant: str, seed: int) -> str:
    return f"INT{bits} g{group}, {variant}, seed {seed}"


def _names(bits: int, group: int, variant: str, n_seeds: int) -> list[str]:
    return [_name(bits, group, variant, seed) for seed in range(1 if variant == RTN else n_seeds)]


def _by_seed(measured: Sequence[Measurement]) -> Object:
    def gather(field: Callable[[Measurement], NDArray[np.float64]]) -> list[Any]:
        return [_rounded(field(m)) for m in measured]

    return {
        "kl": gather(lambda m: m.kl),
        "agreement": gather(lambda m: m.agreement),
        "nll": None if measured[0].output == "hidden" else gather(lambda m: m.nll),
    }


def _rounded(values: NDArray[np.float64]) -> list[float]:
    """Values of the prompts for the only evaluation seed, to eight digits."""
    return [float(f"{v:.8g}") for v in values[0]]


def _states(bench: Bench, model: PreparedModel, weights: Mapping[str, Weights]) -> Object | None:
    """Hidden states by step, and what a probe reads from them. None for systems with logits or without single steps."""
    if bench.system.output != "hidden" or steps_of(bench.system) is None:
        return None
    progress = bench.execution.progress
    first = {f"INT{b} g{g}, {a}": weights[_name(b, g, a, 0)] for b, g in GRIDS for a in (RTN, ONE, ALL)}
    probe = fit_probe(bench.system, model.tuning_held_out, progress)
    states = measure_states(bench.system, first, model.evaluation, probe, progress)
    return states | {
        "probe": {"n_positions": probe.n_positions, "mask_share": MASK_SHARE, "mask_id": MASK_ID}
    }


def show(results: Sequence[Found]) -> Shown:
    """Tables, sentences and the scatter of `loopq.paper.main_text`."""
    record = main_text.summarize(results)
    tested, points = [], []
    for result, model in zip(results, record["models"], strict=True):
        for bits, group in GRIDS:
            claims = main_text.comparisons(result["model"], main_text.on_grid(result, bits, group))
            tested += [
                dataclasses.replace(
                    claims[f"{ALL} / {other}"], text=f"INT{bits} g{group}: {ALL} better than {other}"
                )
                for other in (RTN, ONE)
            ]
        grid = model["grids"][0]
        points.append(
            {
                "name": model["model"],
                "gain": max(layer["gain"] or 1.0 for layer in model["ranks"]["layers"]),
                "gap_closed": grid["variants"][ALL]["gap_closed"]["estimate"],
                "one_step_better": grid["variants"][ONE]["gap_closed"]["estimate"] > 0,
            }
        )
    return Shown(main_text.tables(record), tested, lambda: [gain_scatter(points)], main_text.headline(record))


TABLES.register("main-table")(
    PaperTable(
        ("Table 2",),
        "Rounding, one-step and trajectory calibration",
        "Nine checkpoints, INT4 g128: trajectory calibration is better than rounding and than one step on all and "
        "closes 17 to 102 % of the gap; one step is worse than rounding on five.",
        measure,
        show,
    )
)
