"""The quality table: every method on every member at equal bytes, KL against full precision on held-out text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.collect import Collection, HessianSet
from loopq.calibrate.select import select
from loopq.checkpoint.layer import QuantizedLayer
from loopq.config import LayerConfig, QuantConfig
from loopq.evaluate.compare import Measurement, compare
from loopq.progress import Progress, Silent
from loopq.quantizers.arms import collect_all_steps, solve_arm
from loopq.quantizers.sequential import Sequential, in_model_orientation
from loopq.quantizers.solve import tasks_of
from loopq.reproduce.members import Member

GRIDS = ((4, 128), (3, 32), (2, 32))
CLOSED, SCALES, CODES = "closed form", "gradient: scales", "gradient: codes"


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
    Arm("full + tuned scales", _FULL, asymmetric=True, tier=SCALES),
    Arm("full + tuned codes", _FULL, asymmetric=True, tier=CODES),
)
RTN, TRAJECTORY = "RTN", "GPTQ, trajectory"


def run_member(
    member: Member,
    *,
    grids: Sequence[tuple[int, int]] = GRIDS,
    arms: Sequence[Arm] = ARMS,
    seeds: Sequence[int] = (0, 1, 2),
    n_updates: int = 250,
    threads: int = 0,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Quantize one member by every arm on every grid and measure it.

    Returns
    -------
    list of dict
        One for each grid and arm: bytes, KL (mean and by seed), agreement, bits per byte, gap closed
        1 - KL / KL_RTN, the ratio to trajectory GPTQ, and seconds. For systems without logits the KL's place is
        taken by the squared relative error of the hidden states ("output" says which).
    """
    progress = progress or Silent()
    workshop = _Workshop(member, threads, n_updates, progress)
    records: list[dict[str, Any]] = []
    for bits, group in grids:
        variants: dict[str, dict[str, NDArray[np.float32]]] = {}
        facts: dict[str, dict[str, Any]] = {}
        for arm in arms:
            began = time.monotonic()
            layers = workshop.solve(arm, bits, group)
            facts[arm.name] = {
                "tier": arm.tier,
                "n_bytes": sum(layer.n_bytes for layer in layers.values()),
                "seconds": time.monotonic() - began,
            }
            variants[arm.name] = {n: in_model_orientation(layer) for n, layer in layers.items()}
        measured = compare(member.loaded.system, variants, member.evaluation, seeds=seeds, progress=progress)
        kl = {m.name: float(m.kl.mean()) for m in measured}
        for m in measured[1:]:
            records.append(
                {"member": member.name, "bits": bits, "group_size": group, "arm": m.name}
                | facts[m.name]
                | _row(m, kl)
            )
    return records


def _row(m: Measurement, kl: dict[str, float]) -> dict[str, Any]:
    row = {k: v for k, v in m.summary().items() if k != "name"}
    if RTN in kl:
        row["gap_closed"] = 1 - kl[m.name] / kl[RTN]
    if TRAJECTORY in kl:
        row["ratio_to_trajectory"] = kl[m.name] / kl[TRAJECTORY]
    return row


class _Workshop:
    """Solves arms of one member from one collection; what several arms start from is solved once."""

    def __init__(self, member: Member, threads: int, n_updates: int, progress: Progress) -> None:
        self._member = member
        self._system = member.loaded.system
        self._threads = threads
        self._n_updates = n_updates
        self._progress = progress
        self._sums: HessianSet
        self._sums, self._selection = collect_all_steps(
            self._system, member.calibration, threads=threads, progress=progress
        )
        self._done: dict[tuple[str, int, int], dict[str, QuantizedLayer]] = {}

    def solve(self, arm: Arm, bits: int, group: int) -> dict[str, QuantizedLayer]:
        """Return the layers of an arm."""
        config = QuantConfig(
            LayerConfig(**arm.layer, bits=bits, group_size=group), steps=arm.steps, rank_threshold=None
        )
        key = (f"{arm.layer} {arm.steps} {arm.asymmetric}", bits, group)
        if key not in self._done:
            self._done[key] = self._closed(arm, config)
        layers = self._done[key]
        if arm.tier == CLOSED:
            return layers
        from loopq.tune.tuner import TuneConfig, tune

        tuning = TuneConfig(what="scales" if arm.tier == SCALES else "codes", n_updates=self._n_updates)
        return tune(
            self._system,
            layers,
            self._member.calibration,
            self._member.tuning_held_out,
            tuning,
            progress=self._progress,
        ).layers

    def _closed(self, arm: Arm, config: QuantConfig) -> dict[str, QuantizedLayer]:
        if not arm.asymmetric:
            return solve_arm(self._sums, self._selection, self._system, config, self._threads)
        tasks, _ = tasks_of(self._selection.parameters, self._selection.leaders, config)
        job = Collection(
            self._system, self._member.calibration, select(self._system, self._member.calibration)
        )
        return Sequential(job, threads=self._threads, progress=self._progress).run(tasks)


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Over members: mean and worst of gap closed and of the ratio to trajectory GPTQ, the worst member named."""
    rows = []
    keys = dict.fromkeys((r["bits"], r["group_size"], r["arm"]) for r in records)
    for bits, group, arm in keys:
        mine = [r for r in records if (r["bits"], r["group_size"], r["arm"]) == (bits, group, arm)]
        row: dict[str, Any] = {"bits": bits, "group_size": group, "arm": arm, "tier": mine[0]["tier"]}
        row["n_members"] = len(mine)
        if all("gap_closed" in r for r in mine):
            worst = min(mine, key=lambda r: float(r["gap_closed"]))
            row["gap_closed_mean"] = float(np.mean([r["gap_closed"] for r in mine]))
            row["gap_closed_worst"] = worst["gap_closed"]
            row["worst_member"] = worst["member"]
        if all("ratio_to_trajectory" in r for r in mine):
            row["ratio_mean"] = float(np.exp(np.mean(np.log([r["ratio_to_trajectory"] for r in mine]))))
            row["ratio_worst"] = max(float(r["ratio_to_trajectory"]) for r in mine)
        rows.append(row)
    return rows
