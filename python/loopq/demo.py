"""The demo: rounding, one-step and trajectory calibration and the full solver compared on the embedded model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loopq.api import weights_of
from loopq.calibrate.prompts import Take, calibration_tokens, evaluation_tokens
from loopq.checkpoint.native import Checkpoint
from loopq.diagnose.config import DiagnoseConfig
from loopq.diagnose.survey import diagnose
from loopq.evaluate.compare import Measurement, compare
from loopq.execution import Execution
from loopq.progress import Progress, Silent
from loopq.report.page import write_data, write_report
from loopq.reproduce.models import PLBERT, Sizes, prepare_model
from loopq.run.config import PRESETS, QuantConfig
from loopq.run.engine import Run
from loopq.systems.load import load_model

# Name and settings.
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("RTN", {"method": "rtn", "scale_search": "max"}),
    ("GPTQ, one step", {**PRESETS["paper"], "steps": "first"}),
    ("GPTQ, trajectory", dict(PRESETS["paper"])),
    ("full solver, loop metric", dict(PRESETS["best"])),
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
    calibration = calibration_tokens(loaded, None, Take(n_calibration, seq_len))
    held_out = evaluation_tokens(loaded, None, Take(n_evaluation, seq_len))
    execution = Execution(threads=threads, progress=progress)
    run = Run.prepare(loaded.system, calibration, execution=execution)
    sums = run.all_steps()
    variants = {}
    sizes: dict[str, int] = {}
    layers: list[dict[str, Any]] = []
    tensors = run.weights.tensors
    dense_bytes = sum(t.data.size for t in tensors.values())
    for bits, group in grids:
        for label, settings in VARIANTS:
            config = QuantConfig.of(**settings, bits=bits, group_size=group)
            solved = run.solve_from(sums, config)
            dense = {k: v for k, v in tensors.items() if k not in solved}
            checkpoint = Checkpoint(solved, dense, dict(run.weights.ties), {})
            name = f"{label} INT{bits} g{group}"
            variants[name] = weights_of(checkpoint)
            sizes[name] = checkpoint.n_bytes
            if label == VARIANTS[-1][0] and not layers:
                layers = [{"layer": layer.name, **layer.report} for layer in solved.values()]
    measured = compare(
        loaded.system, variants, held_out, seeds=seeds, batch_size=execution.batch_size, progress=progress
    )
    by_name = {m.name: m for m in measured}
    return {
        "model": model,
        "n_steps": loaded.system.n_steps,
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
                    for label, _ in VARIANTS
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
                f"{name}: no page, since its weights are not in {data or 'a data folder'}; give --data DIR "
                "or set LOOPQ_DATA"
            )
            continue
        prepared = prepare_model(name, _PAGE_SIZES[name], data)
        found = diagnose(
            prepared.loaded.system,
            prepared.evaluation,
            config=config,
            train=prepared.calibration,
            name=name,
            threads=threads,
            progress=progress,
        )
        written.append(write_report(found, out / f"{name}.html"))
        write_data(found, out / f"{name}.json")
    return written, left_out


def _row(label: str, measurement: Measurement, n_bytes: int) -> dict[str, Any]:
    return dataclasses.replace(measurement, name=label).summary() | {"n_bytes": n_bytes}
