"""The main job on the embedded model: rounding, one-step and trajectory calibration, the full solver, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loopq.api import weights_of
from loopq.calibrate.data import windows
from loopq.checkpoint.model_files import model_tensors
from loopq.checkpoint.native import Checkpoint
from loopq.config import BATCH_SIZE, DiagnoseConfig, LayerConfig, QuantConfig
from loopq.errors import ConfigError
from loopq.evaluate.compare import Measurement, Weights, compare
from loopq.progress import Progress, Silent
from loopq.quantizers.arms import LOOP, collect_all_steps, solve_arm
from loopq.quantizers.metric import LoopMetric
from loopq.quantizers.solve import tasks_of
from loopq.reproduce.members import PLBERT, Sizes, load_member

ARMS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("RTN", {"method": "rtn"}, "all"),
    ("GPTQ, one step", {"method": "gptq"}, "first"),
    ("GPTQ, trajectory", {"method": "gptq"}, "all"),
    ("full solver, loop metric", LOOP, "all"),
)
GRIDS = ((4, 32), (3, 32))
# Few prompts, so that both pages take about as long as the comparison; every page states its own counts.
PAGES = {
    "huginn_small": DiagnoseConfig(
        n_prompts=4, n_ablation_prompts=4, n_jacobian_prompts=1, seeds=(0, 1), n_directions=8, n_updates=10
    ),
    PLBERT: DiagnoseConfig(n_prompts=2, n_ablation_prompts=2, n_jacobian_prompts=1, seeds=(0,), batch_size=2),
}
_PAGE_SIZES = {
    "huginn_small": Sizes(n_calibration=16, n_evaluation=32),
    PLBERT: Sizes(n_calibration=4, n_evaluation=16),
}


def run(
    model: str = "huginn_small",
    *,
    grids: Sequence[tuple[int, int]] = GRIDS,
    seeds: Sequence[int] = (0, 1, 2),
    metric_seeds: Sequence[int] = (0,),
    n_calibration: int = 64,
    n_evaluation: int = 32,
    seq_len: int = 128,
    threads: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Quantize the embedded model by each arm on each grid and measure it on held-out text.

    Parameters
    ----------
    seeds : sequence of int
        Initial states of the evaluation, the same for every arm.
    metric_seeds : sequence of int
        Initial states and drawn labels of the loop metric. Its arm is solved once for each, and its figures are means.

    Returns
    -------
    dict
        "reference": full precision's measurement; "grids": for each grid its arms' measurements with bytes;
        "layers": the report of the last arm on the first grid; and the settings. From two metric seeds on, the last
        arm has "kl_by_metric_seed" and their standard deviation "kl_sd".
    """
    from loopq import zoo
    from loopq.systems.load import load_model
    from loopq.tune.metric import loop_metrics

    if not metric_seeds:
        raise ConfigError("the loop metric needs at least one draw: give one metric seed or more")
    progress = progress or Silent()
    loaded = load_model(model)
    system = loaded.system
    calibration = windows(
        zoo.calibration_text().decode(), loaded.encode, seq_len, n_calibration, "embedded calibration text"
    )
    held_out = windows(
        zoo.evaluation_text().decode(), loaded.encode, seq_len, n_evaluation, "embedded evaluation text"
    )
    sums, selection = collect_all_steps(system, calibration, threads=threads, progress=progress)
    tasks, _ = tasks_of(selection.parameters, selection.leaders, QuantConfig(LayerConfig(**LOOP)))
    metrics: dict[int | None, dict[str, LoopMetric]] = {
        seed: loop_metrics(sums, system, calibration, tasks, seed=seed, progress=progress)
        for seed in metric_seeds
    }
    variants: dict[str, Weights] = {}
    sizes: dict[str, int] = {}
    layers: list[dict[str, Any]] = []
    tensors, ties = model_tensors(system.model)
    dense_bytes = sum(t.data.size for t in tensors.values())
    names: dict[tuple[int, int, str], list[str]] = {}
    for bits, group in grids:
        for label, layer, steps in ARMS:
            config = QuantConfig(LayerConfig(**layer, bits=bits, group_size=group), steps=steps)
            # Only the loop metric is drawn: every other arm is solved once.
            for seed in metrics if layer is LOOP else (None,):
                solved = solve_arm(sums, selection, system, config, threads, metrics.get(seed))
                checkpoint = Checkpoint(
                    solved, {k: v for k, v in tensors.items() if k not in solved}, ties, {}
                )
                name = f"{label} INT{bits} g{group}" + ("" if seed is None else f" seed {seed}")
                names.setdefault((bits, group, label), []).append(name)
                variants[name] = weights_of(checkpoint)
                sizes[name] = checkpoint.n_bytes
                if layer is LOOP and not layers:
                    layers = [{"layer": x.name, **x.report} for x in solved.values()]
    measured = compare(system, variants, held_out, seeds=seeds, batch_size=BATCH_SIZE, progress=progress)
    by_name = {m.name: m for m in measured}
    return {
        "model": model,
        "n_steps": system.n_steps,
        "calibration": calibration.describe(),
        "evaluation": held_out.describe(),
        "seeds": list(seeds),
        "metric_seeds": list(metric_seeds),
        "reference": measured[0].summary() | {"n_bytes": dense_bytes},
        "grids": [
            {
                "bits": bits,
                "group_size": group,
                "arms": [
                    _arm(label, [by_name[n] for n in found], sizes[found[0]])
                    for label, found in ((label, names[bits, group, label]) for label, _, _ in ARMS)
                ],
            }
            for bits, group in grids
        ],
        "layers": layers,
    }


def pages(
    out: Path, *, data: Path | None = None, threads: int = 0, progress: Progress | None = None
) -> tuple[list[Path], list[str]]:
    """Diagnose the embedded model and PL-BERT, a real looped checkpoint, and write a page for each.

    Parameters
    ----------
    out : Path
        Folder; `NAME.html` and `NAME.json` are written to it.
    data : Path, optional
        Data folder with `models/plbert_kokoro`; where it is not there, PL-BERT is left out and said so.
    threads : int
        Threads of the core; 0 takes all cores.
    progress : Progress, optional
        Told of every section.

    Returns
    -------
    list of Path
        The pages.
    list of str
        What was left out, and why.
    """
    from loopq.diagnose.survey import diagnose
    from loopq.report.page import write_data, write_report

    out.mkdir(parents=True, exist_ok=True)
    written, left = [], []
    for name, config in PAGES.items():
        if name == PLBERT and (data is None or not (data / "models" / "plbert_kokoro").is_dir()):
            left.append(
                f"{name}: no page: its weights are not in {data or 'a data folder'}; set LOOPQ_DATA or give --data"
            )
            continue
        member = load_member(name, _PAGE_SIZES[name], data)
        found = diagnose(
            member.loaded.system,
            member.evaluation,
            config=config,
            train=member.calibration,
            name=name,
            threads=threads,
            progress=progress,
        )
        written.append(write_report(found, out / f"{name}.html"))
        write_data(found, out / f"{name}.json")
    return written, left


def _arm(label: str, measurements: Sequence[Measurement], n_bytes: int) -> dict[str, Any]:
    """Summary of an arm, the mean over its measurements; from two on with the standard deviation between them."""
    mean = {f: np.mean([getattr(m, f) for m in measurements], axis=0) for f in ("kl", "agreement", "nll")}
    summary = dataclasses.replace(measurements[0], name=label, **mean).summary() | {"n_bytes": n_bytes}
    if len(measurements) > 1:
        drawn = [float(m.kl.mean()) for m in measurements]
        summary |= {"kl_by_metric_seed": drawn, "kl_sd": float(np.std(drawn, ddof=1))}
    return summary
