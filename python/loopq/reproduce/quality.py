"""The quality table: every method on every member at equal bytes, KL against full precision on held-out text."""

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
from loopq.reproduce.models import PreparedModel
from loopq.tune.metric import loop_metrics

GRIDS = ((4, 128), (3, 32), (2, 32))
CLOSED, METRIC = "closed form", "closed form, loop metric"
SCALES, CODES = "gradient: scales", "gradient: codes"


@dataclass(frozen=True)
class Arm:
    """One row of the table.

    Parameters
    ----------
    name : str
        Its label.
    layer : dict
        Fields of `LayerConfig` besides bits and group size.
    steps : str
        Steps that are summed.
    asymmetric : bool
        Layer by layer, against the outputs of full precision.
    tier : str
        "closed form", or which numbers are tuned by gradient.
    """

    name: str
    layer: dict[str, Any] = field(default_factory=dict)
    steps: str = "all"
    asymmetric: bool = False
    tier: str = CLOSED


_FULL = {"method": "full"}
ARMS = (
    Arm("RTN", {"method": "rtn"}),
    Arm("RTN, asymmetric grid", {"method": "rtn", "symmetric": False}),
    Arm("GPTQ, one step", {"method": "gptq"}, steps="first"),
    Arm("GPTQ, trajectory", {"method": "gptq"}),
    Arm("AWQ, trajectory", {"method": "awq", "symmetric": False}),
    Arm("full", _FULL),
    Arm("full, balanced steps", {**_FULL, "step_weights": "balanced", "damping_kind": "diagonal"}),
    Arm("full, positive scales", {**_FULL, "signed_scales": False}),
    Arm("full, asymmetric grid", {**_FULL, "symmetric": False}),
    Arm("full, asymmetric calibration", _FULL, asymmetric=True),
    Arm("full, loop metric", LOOP, tier=METRIC),
    Arm("full, loop metric, asymmetric calibration", LOOP, asymmetric=True, tier=METRIC),
    Arm("full + tuned scales", LOOP, asymmetric=True, tier=SCALES),
    Arm("full + tuned codes", LOOP, asymmetric=True, tier=CODES),
)
RTN, TRAJECTORY = "RTN", "GPTQ, trajectory"


def record_of(
    workshop: Workshop, arm: Arm, bits: int, group: int, seeds: Sequence[int], draw: int
) -> dict[str, Any]:
    """Quantize one member by one arm on one grid and measure it.

    Returns
    -------
    dict
        Bytes, KL (mean and by seed), agreement, bits per byte and seconds. For systems without logits the KL's
        place is taken by the squared relative error of the hidden states ("output" says which).
    """
    began = time.monotonic()
    layers = workshop.solve(arm, bits, group)
    seconds = time.monotonic() - began
    weights = {n: layer.in_model_orientation() for n, layer in layers.items()}
    member = workshop.member
    found = compare(
        member.loaded.system,
        {arm.name: weights},
        member.evaluation,
        seeds=seeds,
        scored_from=member.scored_from,
    )[1]
    row = {k: v for k, v in found.summary().items() if k != "name"}
    return {
        "member": member.name,
        "bits": bits,
        "group_size": group,
        "arm": arm.name,
        "tier": arm.tier,
        "draw": draw,
        "n_bytes": sum(layer.n_bytes for layer in layers.values()),
        "seconds": seconds,
    } | row


def related(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean over draws for each member, grid and arm, with gap closed 1 - KL / KL_RTN and ratio to trajectory GPTQ."""
    rows: list[dict[str, Any]] = []
    keys = dict.fromkeys((r["member"], r["bits"], r["group_size"], r["arm"]) for r in records)
    mean: dict[tuple[Any, ...], float] = {}
    for key in keys:
        mine = [r for r in records if (r["member"], r["bits"], r["group_size"], r["arm"]) == key]
        mean[key] = float(np.mean([r["kl"] for r in mine]))
        rows.append(
            {k: mine[0][k] for k in ("member", "bits", "group_size", "arm", "tier", "n_bytes", "output")}
            | {"kl": mean[key], "n_draws": len(mine), "kl_by_draw": [r["kl"] for r in mine]}
            | {k: float(np.mean([r[k] for r in mine])) for k in ("agreement", "seconds")}
        )
    for row in rows:
        place = (row["member"], row["bits"], row["group_size"])
        if (*place, RTN) in mean:
            row["gap_closed"] = 1 - row["kl"] / mean[*place, RTN]
        if (*place, TRAJECTORY) in mean:
            row["ratio_to_trajectory"] = row["kl"] / mean[*place, TRAJECTORY]
    return rows


class Workshop:
    """Solves arms of one member from one collection; what several arms start from is solved once."""

    def __init__(
        self, member: PreparedModel, threads: int = 0, n_updates: int = 250, progress: Progress | None = None
    ) -> None:
        self.member = member
        self._system = member.loaded.system
        self._threads = threads
        self._n_updates = n_updates
        self._progress = progress or Silent()
        self._collected: tuple[HessianSet, Selection] | None = None
        self._metrics: dict[str, LoopMetric] | None = None
        self._done: dict[tuple[str, int, int], dict[str, QuantizedLayer]] = {}
        # Layers outside the loop that the paper rounds, a head say: the full solver calibrates them, no other arm does.
        declared = self._system.shared_parameters(self._system.n_steps)
        self._rounded = [p.name for p in declared if p.treatment == "rtn"]

    def solve(self, arm: Arm, bits: int, group: int) -> dict[str, QuantizedLayer]:
        """Return the layers of an arm."""
        config = QuantConfig(
            LayerConfig(**arm.layer, bits=bits, group_size=group), steps=arm.steps, rank_threshold=None
        )
        key = (f"{arm.layer} {arm.steps} {arm.asymmetric}", bits, group)
        if key not in self._done:
            self._done[key] = self.closed(config, arm.asymmetric)
        layers = self._done[key]
        if arm.tier in (CLOSED, METRIC):
            return layers
        from loopq.tune.tuner import TuneConfig, tune

        tuning = TuneConfig(what="scales" if arm.tier == SCALES else "codes", n_updates=self._n_updates)
        return tune(
            self._system,
            layers,
            self.member.calibration,
            self.member.tuning_held_out,
            tuning,
            progress=self._progress,
        ).layers

    def collected(self) -> tuple[HessianSet, Selection]:
        """Hessians of every step, collected once."""
        if self._collected is None:
            self._collected = collect_all_steps(
                self._system,
                self.member.calibration,
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
            self._metrics = loop_metrics(sums, self._system, self.member.calibration, tasks)
        return self._metrics

    def closed(self, config: QuantConfig, asymmetric: bool) -> dict[str, QuantizedLayer]:
        """Layers of a closed form."""
        sums, selection = self.collected()
        change = {"steps": "all"} | ({} if config.layer.method == "full" else {"method": "rtn"})
        rounded = tuple(Override(name, change) for name in self._rounded)
        config = dataclasses.replace(config, overrides=(*rounded, *config.overrides))
        tasks, _ = tasks_of(selection.parameters, selection.leaders, config)
        metrics = self._metric(tasks)
        if not asymmetric:
            return solve_arm(sums, selection, self._system, config, self._threads, metrics)
        job = Collection(self._system, self.member.calibration, selection)
        return Sequential(job, threads=self._threads, progress=self._progress, metrics=metrics).run(tasks)


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over members: mean and worst of gap closed and of the ratio to trajectory GPTQ, the worst member named."""
    rows = []
    keys = dict.fromkeys((r["bits"], r["group_size"], r["arm"]) for r in records)
    for bits, group, arm in keys:
        mine = [r for r in records if (r["bits"], r["group_size"], r["arm"]) == (bits, group, arm)]
        row: dict[str, Any] = {"bits": bits, "group_size": group, "arm": arm, "tier": mine[0]["tier"]}
        row["n_members"] = len(mine)
        row["seconds"] = float(np.mean([r["seconds"] for r in mine]))
        if all("gap_closed" in r for r in mine):
            worst = min(mine, key=lambda r: float(r["gap_closed"]))
            row["gap_closed_mean"] = float(np.mean([r["gap_closed"] for r in mine]))
            row["gap_closed_worst"] = worst["gap_closed"]
            row["worst_member"] = worst["member"]
        if all("ratio_to_trajectory" in r for r in mine):
            row["ratio_mean"] = float(np.exp(np.mean(np.log([r["ratio_to_trajectory"] for r in mine]))))
            last = max(mine, key=lambda r: float(r["ratio_to_trajectory"]))
            row["ratio_worst"], row["ratio_worst_member"] = last["ratio_to_trajectory"], last["member"]
        rows.append(row)
    return rows
