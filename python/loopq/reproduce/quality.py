"""The quality table: every method on every model at equal bytes, KL to full precision on held-out text."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loopq.calibrate.collect import Collection, HessianSet
from loopq.calibrate.select import Selection
from loopq.checkpoint.layer import QuantizedLayer
from loopq.config import LayerConfig, Override, QuantConfig
from loopq.evaluate.compare import compare
from loopq.progress import Progress, Silent
from loopq.quantizers.arms import LOOP, collect_all_steps, solve_arm
from loopq.quantizers.metric import LoopMetric
from loopq.quantizers.sequential import Sequential
from loopq.quantizers.solve import Task, tasks_of
from loopq.reproduce.members import Member
from loopq.stats import gap_closed
from loopq.tune.metric import loop_metrics
from loopq.tune.tuner import TuneConfig, tune

GRIDS = ((4, 128), (3, 32), (2, 32))
CLOSED, METRIC = "closed form", "closed form, loop metric"
SCALES, CODES = "gradient: scales", "gradient: codes"


@dataclass(frozen=True)
class Variant:
    """One row of the table.

    Parameters
    ----------
    name : str
        Label.
    layer : dict
        Fields of `LayerConfig` besides bits and group size.
    steps : str
        Steps whose Hessians are summed.
    asymmetric : bool
        Whether layers are calibrated one after another, against the outputs of full precision.
    tier : str
        "closed form", with or without the loop metric, or what is tuned by gradient.
    """

    name: str
    layer: dict[str, Any] = field(default_factory=dict)
    steps: str = "all"
    asymmetric: bool = False
    tier: str = CLOSED


_FULL = {"method": "full"}
VARIANTS = (
    Variant("RTN", {"method": "rtn"}),
    Variant("RTN, asymmetric grid", {"method": "rtn", "symmetric": False}),
    Variant("GPTQ, one step", {"method": "gptq"}, steps="first"),
    Variant("GPTQ, trajectory", {"method": "gptq"}),
    Variant("AWQ, trajectory", {"method": "awq", "symmetric": False}),
    Variant("full", _FULL),
    Variant("full, balanced steps", {**_FULL, "step_weights": "balanced", "damping_kind": "diagonal"}),
    Variant("full, positive scales", {**_FULL, "signed_scales": False}),
    Variant("full, asymmetric grid", {**_FULL, "symmetric": False}),
    Variant("full, asymmetric calibration", _FULL, asymmetric=True),
    Variant("full, loop metric", LOOP, tier=METRIC),
    Variant("full, loop metric, asymmetric calibration", LOOP, asymmetric=True, tier=METRIC),
    Variant("full + tuned scales", LOOP, asymmetric=True, tier=SCALES),
    Variant("full + tuned codes", LOOP, asymmetric=True, tier=CODES),
)
RTN, TRAJECTORY = "RTN", "GPTQ, trajectory"


def record_of(
    solutions: SolutionCache, variant: Variant, bits: int, group: int, seeds: Sequence[int], draw: int
) -> dict[str, Any]:
    """Quantize one model in one variant on one grid and measure it.

    Returns
    -------
    dict
        Bytes, KL (mean and by seed), agreement, bits per byte and seconds. For systems without logits the KL is
        replaced by the squared relative error of the hidden states; "output" says which.
    """
    began = time.monotonic()
    layers = solutions.solve(variant, bits, group)
    seconds = time.monotonic() - began
    weights = {n: layer.in_model_orientation() for n, layer in layers.items()}
    model = solutions.model
    found = compare(
        model.loaded.system,
        {variant.name: weights},
        model.evaluation,
        seeds=seeds,
        scored_from=model.scored_from,
    )[1]
    row = {k: v for k, v in found.summary().items() if k != "name"}
    return {
        "model": model.name,
        "bits": bits,
        "group_size": group,
        "variant": variant.name,
        "tier": variant.tier,
        "draw": draw,
        "n_bytes": sum(layer.n_bytes for layer in layers.values()),
        "seconds": seconds,
    } | row


def related(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean over draws for each model, grid and variant, with gap closed and ratio of KL to trajectory GPTQ."""
    rows: list[dict[str, Any]] = []
    keys = dict.fromkeys((r["model"], r["bits"], r["group_size"], r["variant"]) for r in records)
    mean: dict[tuple[Any, ...], float] = {}
    for key in keys:
        mine = [r for r in records if (r["model"], r["bits"], r["group_size"], r["variant"]) == key]
        mean[key] = float(np.mean([r["kl"] for r in mine]))
        rows.append(
            {k: mine[0][k] for k in ("model", "bits", "group_size", "variant", "tier", "n_bytes", "output")}
            | {"kl": mean[key], "n_draws": len(mine), "kl_by_draw": [r["kl"] for r in mine]}
            | {k: float(np.mean([r[k] for r in mine])) for k in ("agreement", "seconds")}
        )
    for row in rows:
        place = (row["model"], row["bits"], row["group_size"])
        if (*place, RTN) in mean:
            row["gap_closed"] = gap_closed(row["kl"], mean[*place, RTN], 0.0)
        if (*place, TRAJECTORY) in mean:
            row["ratio_to_trajectory"] = row["kl"] / mean[*place, TRAJECTORY]
    return rows


class SolutionCache:
    """Solves variants of one model from one collection; a closed-form solution that several start from is kept."""

    def __init__(
        self, model: Member, threads: int = 0, n_updates: int = 250, progress: Progress | None = None
    ) -> None:
        self.model = model
        self._system = model.loaded.system
        self._threads = threads
        self._n_updates = n_updates
        self._progress = progress or Silent()
        self._collected: tuple[HessianSet, Selection] | None = None
        self._metrics: dict[str, LoopMetric] | None = None
        self._done: dict[tuple[str, int, int], dict[str, QuantizedLayer]] = {}
        # Layers outside the loop that are rounded by default (Li, App. Q), such as a head: only the full solver
        # calibrates them.
        declared = self._system.shared_parameters(self._system.n_steps)
        self._rounded = [p.name for p in declared if p.treatment == "rtn"]

    def solve(self, variant: Variant, bits: int, group: int) -> dict[str, QuantizedLayer]:
        """Return the layers of a variant."""
        config = QuantConfig(
            LayerConfig(**variant.layer, bits=bits, group_size=group),
            steps=variant.steps,
            rank_threshold=None,
        )
        key = (f"{variant.layer} {variant.steps} {variant.asymmetric}", bits, group)
        if key not in self._done:
            self._done[key] = self.closed(config, variant.asymmetric)
        layers = self._done[key]
        if variant.tier in (CLOSED, METRIC):
            return layers
        tuning = TuneConfig(what="scales" if variant.tier == SCALES else "codes", n_updates=self._n_updates)
        return tune(
            self._system,
            layers,
            self.model.calibration,
            self.model.tuning_held_out,
            tuning,
            progress=self._progress,
        ).layers

    def collected(self) -> tuple[HessianSet, Selection]:
        """Hessians of every step, collected at the first call."""
        if self._collected is None:
            self._collected = collect_all_steps(
                self._system,
                self.model.calibration,
                include=self._rounded,
                threads=self._threads,
                progress=self._progress,
            )
        return self._collected

    def _metric(self, tasks: Sequence[Task]) -> dict[str, LoopMetric]:
        if all(t.config.metric == "inputs" for t in tasks):
            return {}
        if self._metrics is None:
            sums, _ = self.collected()
            self._metrics = loop_metrics(sums, self._system, self.model.calibration, tasks)
        return self._metrics

    def closed(self, config: QuantConfig, asymmetric: bool) -> dict[str, QuantizedLayer]:
        """Return the layers of a closed-form solver."""
        sums, selection = self.collected()
        change = {"steps": "all"} | ({} if config.layer.method == "full" else {"method": "rtn"})
        rounded = tuple(Override(name, change) for name in self._rounded)
        config = dataclasses.replace(config, overrides=(*rounded, *config.overrides))
        tasks, _ = tasks_of(selection.parameters, selection.leaders, config)
        metrics = self._metric(tasks)
        if not asymmetric:
            return solve_arm(sums, selection, self._system, config, self._threads, metrics)
        job = Collection(self._system, self.model.calibration, selection)
        return Sequential(job, threads=self._threads, progress=self._progress, metrics=metrics).run(tasks)


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and worst over models of gap closed and of the ratio to trajectory GPTQ, with the worst model's name."""
    rows = []
    keys = dict.fromkeys((r["bits"], r["group_size"], r["variant"]) for r in records)
    for bits, group, variant in keys:
        mine = [r for r in records if (r["bits"], r["group_size"], r["variant"]) == (bits, group, variant)]
        row: dict[str, Any] = {"bits": bits, "group_size": group, "variant": variant, "tier": mine[0]["tier"]}
        row["n_models"] = len(mine)
        row["seconds"] = float(np.mean([r["seconds"] for r in mine]))
        if all("gap_closed" in r for r in mine):
            worst = min(mine, key=lambda r: float(r["gap_closed"]))
            row["gap_closed_mean"] = float(np.mean([r["gap_closed"] for r in mine]))
            row["gap_closed_worst"] = worst["gap_closed"]
            row["worst_model"] = worst["model"]
        if all("ratio_to_trajectory" in r for r in mine):
            row["ratio_mean"] = float(np.exp(np.mean(np.log([r["ratio_to_trajectory"] for r in mine]))))
            last = max(mine, key=lambda r: float(r["ratio_to_trajectory"]))
            row["ratio_worst"], row["ratio_worst_model"] = last["ratio_to_trajectory"], last["model"]
        rows.append(row)
    return rows
