"""The quality table: every method on every model at equal bytes, KL to full precision on held-out text."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loopq.calibrate.collect import HessianSet
from loopq.evaluation.compare import compare
from loopq.evaluation.stats import gap_closed
from loopq.paper.models import PreparedModel
from loopq.quantizers.config import Override
from loopq.run.config import PRESETS, QuantConfig
from loopq.run.solving import solve_from
from loopq.run.source import Layers, ModelSource
from loopq.settings.execution import Execution
from loopq.terminal.progress import Progress, Silent

GRIDS = ((4, 128), (3, 32), (2, 32))
LOOP: dict[str, Any] = {**PRESETS["best"], "levels": "even"}
CLOSED, METRIC = "closed form", "closed form, loop metric"


@dataclass(frozen=True)
class Variant:
    """One row of the table.

    Parameters
    ----------
    name : str
        Label.
    layer : dict
        Flat settings besides bits and group size.
    steps : str
        Steps whose Hessians are summed.
    asymmetric : bool
        Whether layers are calibrated one after another, against the outputs of full precision.
    tier : str
        "closed form", with or without the loop metric.
    """

    name: str
    layer: dict[str, Any] = field(default_factory=dict)
    steps: str = "all"
    asymmetric: bool = False
    tier: str = CLOSED


_CD = {"method": "gptq-cd", "metric": "inputs"}
_RTN = {"method": "rtn", "scale_search": "max"}
_PAPER = dict(PRESETS["paper"])
VARIANTS = (
    Variant("RTN", _RTN),
    Variant("RTN, searched scales", {"method": "rtn"}),
    Variant("RTN, asymmetric grid", {**_RTN, "symmetric": False}),
    Variant("GPTQ, one step", _PAPER, steps="first"),
    Variant("GPTQ, trajectory", _PAPER),
    Variant("GPTQ, trajectory, searched scales", {"method": "gptq"}),
    Variant("AWQ, trajectory", {"method": "awq", "symmetric": False, "scale_search": "max"}),
    Variant("gptq-cd", {**_CD, "damping_kind": "mean"}),
    Variant("gptq-cd, diagonal damping", _CD),
    Variant("gptq-cd, balanced steps", {**_CD, "step_weights": "balanced"}),
    Variant("gptq-cd, positive scales", {**_CD, "signed_scales": False}),
    Variant("gptq-cd, asymmetric grid", {**_CD, "symmetric": False}),
    Variant("gptq-cd, asymmetric calibration", _CD, asymmetric=True),
    Variant("gptq-cd, loop metric", LOOP, tier=METRIC),
    Variant("gptq-cd, loop metric, asymmetric calibration", LOOP, asymmetric=True, tier=METRIC),
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
        count_bytes=model.loaded.count_bytes,
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

    def __init__(self, model: PreparedModel, threads: int = 0, progress: Progress | None = None) -> None:
        self.model = model
        system = model.loaded.system
        # Layers outside the loop are rounded (Li, App. Q), such as a head: gptq-cd alone calibrates them.
        declared = system.shared_parameters(system.n_steps)
        self._rounded = tuple(p.name for p in declared if p.treatment == "rtn")
        self._config = QuantConfig(include=self._rounded)
        self._source = ModelSource.of(
            system,
            model.calibration,
            self._config,
            execution=Execution(threads=threads, progress=progress or Silent()),
        )
        self._sums: HessianSet | None = None
        self._done: dict[tuple[str, int, int], Layers] = {}

    def solve(self, variant: Variant, bits: int, group: int) -> Layers:
        """Return the layers of a variant."""
        config = QuantConfig.of(
            **variant.layer, bits=bits, group_size=group, steps=variant.steps, rank_threshold=None
        )
        key = (f"{variant.layer} {variant.steps} {variant.asymmetric}", bits, group)
        if key not in self._done:
            self._done[key] = self.closed(config, variant.asymmetric)
        return self._done[key]

    def collected(self) -> tuple[ModelSource, HessianSet]:
        """Hessians of every step, collected once."""
        if self._sums is None:
            self._sums = self._source.all_steps(self._source.plan(self._config))
        return self._source, self._sums

    def closed(self, config: QuantConfig, asymmetric: bool) -> Layers:
        """Layers of a closed form."""
        source, sums = self.collected()
        change = {"steps": "all"} | ({} if config.layer.method.name == "gptq-cd" else {"method": "rtn"})
        rounded = tuple(Override(name, change) for name in self._rounded)
        config = dataclasses.replace(config, overrides=(*rounded, *config.overrides), include=self._rounded)
        plan = source.plan(config.changed(inputs="asymmetric" if asymmetric else "open"))
        return solve_from(plan, source, sums)


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
