"""The demo: rounding, one-step and trajectory calibration and the full solver compared on the embedded model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loopq import zoo
from loopq.api import weights_of
from loopq.calibrate.data import windows
from loopq.checkpoint.model_files import model_tensors
from loopq.checkpoint.native import Checkpoint
from loopq.config import BATCH_SIZE, DiagnoseConfig, LayerConfig, QuantConfig
from loopq.diagnose.survey import diagnose
from loopq.evaluate.compare import Measurement, compare
from loopq.progress import Progress, Silent
from loopq.quantizers.arms import LOOP, collect_all_steps, solve_arm
from loopq.quantizers.solve import tasks_of
from loopq.report.page import write_data, write_report
from loopq.reproduce.members import PLBERT, Sizes, load_member
from loopq.systems.load import load_model
from loopq.tune.metric import loop_metrics

# Name, fields of `LayerConfig`, steps whose Hessians are summed.
VARIANTS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("RTN", {"method": "rtn"}, "all"),
    ("GPTQ, one step", {"method": "gptq"}, "first"),
    ("GPTQ, trajectory", {"method": "gptq"}, "all"),
    ("full solver, loop metric", LOOP, "all"),
)
GRIDS = ((4, 32), (3, 32))
# Few prompts, so that both pages take about as long as the comparison; every page states its counts.
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
    n_calibration: int = 64,
    n_evaluation: int = 32,
    seq_len: int = 128,
    threads: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Quantize the embedded model in every variant on every grid and measure it on held-out text.

    Returns
    -------
    dict
        "reference": the measurement of full precision; "grids": for each grid the measurements and bytes of its
        variants; "layers": the reports of the last variant's layers on the first grid; and the settings.
    """
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
    metrics = loop_metrics(sums, system, calibration, tasks, progress=progress)
    variants = {}
    sizes: dict[str, int] = {}
    layers: list[dict[str, Any]] = []
    tensors, ties = model_tensors(system.model)
    dense_bytes = sum(t.data.size for t in tensors.values())
    for bits, group in grids:
        for label, layer, steps in VARIANTS:
            config = QuantConfig(LayerConfig(**layer, bits=bits, group_size=group), steps=steps)
            solved = solve_arm(sums, selection, system, config, threads, metrics)
            checkpoint = Checkpoint(solved, {k: v for k, v in tensors.items() if k not in solved}, ties, {})
            name = f"{label} INT{bits} g{group}"
            variants[name] = weights_of(checkpoint)
            sizes[name] = checkpoint.n_bytes
            if label == VARIANTS[-1][0] and not layers:
                layers = [{"layer": layer.name, **layer.report} for layer in solved.values()]
    measured = compare(system, variants, held_out, seeds=seeds, batch_size=BATCH_SIZE, progress=progress)
    by_name = {m.name: m for m in measured}
    return {
        "model": model,
        "n_steps": system.n_steps,
        "calibration": calibration.describe(),
        "evaluation": held_out.describe(),
        "seeds": list(seeds),
        "reference": measured[0].summary() | {"n_bytes": dense_bytes},
        "grids": [
            {
                "bits": bits,
                "group_size": group,
                "variants": [
                    _row(label, by_name[f"{label} INT{bits} g{group}"], sizes[f"{label} INT{bits} g{group}"])
                    for label, _, _ in VARIANTS
                ],
            }
            for bits, group in grids
        ],
        "layers": layers,
    }


def pages(
    out: Path, *, data: Path | None = None, threads: int = 0, progress: Progress | None = None
) -> tuple[list[Path], list[str]]:
    """Diagnose the embedded model and PL-BERT, a published looped checkpoint, and write a page for each.

    Parameters
    ----------
    out : Path
        Folder in which `NAME.html` and `NAME.json` are written.
    data : Path, optional
        Data folder with `models/plbert_kokoro`. Without it PL-BERT is left out, which the second result says.
    threads : int
        Threads of the core; 0 takes all cores.
    progress : Progress, optional
        Notified of every section.

    Returns
    -------
    list of Path
        The pages.
    list of str
        Models that were left out, and why.
    """
    out.mkdir(parents=True, exist_ok=True)
    written, left_out = [], []
    for name, config in PAGES.items():
        if name == PLBERT and (data is None or not (data / "models" / "plbert_kokoro").is_dir()):
            left_out.append(
                f"{name}: no page: its weights are not in {data or 'a data folder'}; set LOOPQ_DATA or give --data"
            )
            continue
        model = load_member(name, _PAGE_SIZES[name], data)
        found = diagnose(
            model.loaded.system,
            model.evaluation,
            config=config,
            train=model.calibration,
            name=name,
            threads=threads,
            progress=progress,
        )
        written.append(write_report(found, out / f"{name}.html"))
        write_data(found, out / f"{name}.json")
    return written, left_out


def _row(label: str, measurement: Measurement, n_bytes: int) -> dict[str, Any]:
    return dataclasses.replace(measurement, name=label).summary() | {"n_bytes": n_bytes}
