"""The demo: rounding, GPTQ on one step, on the trajectory and with another tool's rules, and loopq on two grids."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loopq.calibrate.data import TokenSet
from loopq.calibrate.plbert import PLBERT, load_plbert, phonemes
from loopq.calibrate.prompts import CalibrationTake, Take, calibration_tokens, evaluation_tokens
from loopq.diagnosis.config import DiagnoseConfig
from loopq.diagnosis.context import Context
from loopq.diagnosis.survey import diagnose
from loopq.errors import ConfigError
from loopq.evaluation.compare import Measurement, compare
from loopq.formats.checkpoint import Checkpoint, weights_of
from loopq.models.load import LoadedModel, load_model
from loopq.report.page import write_data, write_page
from loopq.run.auto import choose_metric
from loopq.run.config import PRESETS, QuantConfig
from loopq.run.model_source import ModelSource
from loopq.run.solving import solve_from
from loopq.settings.execution import Execution

#: Defaults of llm-compressor when its Hessian is summed over all calls. A group's scale comes from its largest
#: magnitude and half the code range, before the sweep. Columns are sorted by falling diag H. Damping is a hundredth
#: of the mean.
LLM_COMPRESSOR: dict[str, Any] = {
    "method": "gptq", "scale_search": "half-range", "scales": "static", "act_order": True
}  # fmt: skip
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("RTN", {"method": "rtn", "scale_search": "max"}),
    ("GPTQ, one step", {**PRESETS["paper"], "steps": "first"}),
    ("GPTQ, trajectory", dict(PRESETS["paper"])),
    ("GPTQ, llm-compressor's rules", LLM_COMPRESSOR),
    ("loopq", {}),
    ("loopq, uneven levels", {"levels": "uneven"}),
)
BEST = ("loopq, preset best", dict(PRESETS["best"]))
GRIDS = ((4, 32), (3, 32))
CALIBRATION, EVALUATION = CalibrationTake(64), Take(32)
# Few prompts, so that both pages take about as long as the comparison; every page states its counts.
PAGES = {
    "huginn_small": DiagnoseConfig(
        n_prompts=4, n_ablation_prompts=4, n_jacobian_prompts=1, seeds=(0, 1), n_directions=8, n_updates=10
    ),
    PLBERT: DiagnoseConfig(n_prompts=2, n_ablation_prompts=2, n_jacobian_prompts=1, seeds=(0,)),
}
# Batch sizes that are smaller than usual.
_PAGE_BATCHES = {PLBERT: 2}
# Prompts for training the update, and prompts for the diagnosis.
_PAGE_TAKES = {"huginn_small": (Take(16), Take(32)), PLBERT: (Take(4), Take(16))}


def run(
    *,
    best: bool = False,
    grids: Sequence[tuple[int, int]] = GRIDS,
    seeds: Sequence[int] = (0, 1, 2),
    metric_seeds: Sequence[int] = (0,),
    calibration: CalibrationTake = CALIBRATION,
    evaluation: Take = EVALUATION,
    execution: Execution | None = None,
) -> dict[str, Any]:
    """Quantize the embedded model in every variant on every grid and measure it on held-out text.

    Parameters
    ----------
    best : bool
        Add preset best, which takes longer than all others together.
    grids : sequence of (int, int)
        Bits and group size of each grid. All variants use them.
    seeds : sequence of int
        Initial states of the evaluation. All variants share them.
    metric_seeds : sequence of int
        Initial states and drawn labels of the loop metric. Variants with the loop metric are solved once per seed, and
        their figures are means.
    calibration, evaluation : Take
        Number and length of prompts. Variants without the loop metric use the unchanged text.
    execution : Execution, optional
        Threads and progress.

    Returns
    -------
    dict
        "reference" is the measurement of full precision. "grids" holds the measurements and bytes of the variants for
        each grid. "layers" holds the layer reports of the last variant on the first grid. The settings follow. With at
        least two metric seeds, variants with the loop metric also have "kl_by_metric_seed" and the standard deviation
        "kl_sd".

    Raises
    ------
    ConfigError
        There is no metric seed.
    """
    if not metric_seeds:
        raise ConfigError("the loop metric needs at least one draw: give one metric seed or more")
    execution = execution or Execution()
    loaded = load_model("huginn_small")
    changed = calibration_tokens(loaded, None, calibration)
    plain = calibration_tokens(loaded, None, Take(calibration.n_prompts, calibration.seq_len))
    held_out = evaluation_tokens(loaded, None, evaluation)
    source, others = (ModelSource.of(loaded.system, text, execution=execution) for text in (changed, plain))
    sums, sums_of_others = (s.all_steps(s.plan(QuantConfig())) for s in (source, others))
    drawn = [_redrawn(source, seed) for seed in metric_seeds]
    rows = (*VARIANTS, BEST) if best else VARIANTS
    variants = {}
    names: dict[tuple[int, int, str], list[str]] = {}
    sizes: dict[str, int] = {}
    layers: list[dict[str, Any]] = []
    tensors = source.weights.tensors
    dense_bytes = sum(t.data.size for t in tensors.values())
    for bits, group in grids:
        for label, settings in rows:
            asked = source.plan(QuantConfig.of(**settings, bits=bits, group_size=group))
            config = choose_metric(asked, source.job).config
            # Only the loop metric has random draws. Every other variant is solved once, from the unchanged text.
            ours = config.layer.method.gradients
            for number, one in enumerate(drawn if ours else [others]):
                solved = solve_from(one.plan(config), one, sums if ours else sums_of_others)
                dense = {k: v for k, v in tensors.items() if k not in solved}
                checkpoint = Checkpoint(solved, dense, dict(source.weights.ties), {})
                name = f"{label} INT{bits} g{group} draw {number}"
                names.setdefault((bits, group, label), []).append(name)
                variants[name] = weights_of(checkpoint)
                sizes[name] = checkpoint.n_bytes
                if label == rows[-1][0] and not layers:
                    layers = [
                        {"layer": layer.name, **layer.report, "grid": layer.grid.label}
                        for layer in solved.values()
                    ]
    measured = compare(
        loaded.system, variants, held_out, seeds=seeds, count_bytes=loaded.count_bytes, execution=execution
    )
    by_name = {m.name: m for m in measured}
    return {
        "model": loaded.report.source,
        "n_steps": loaded.system.n_steps,
        "calibration": changed.describe(),
        "evaluation": held_out.describe(),
        "seeds": list(seeds),
        "metric_seeds": list(metric_seeds),
        "reference": measured[0].summary() | {"n_bytes": dense_bytes},
        "grids": [
            {
                "bits": bits,
                "group_size": group,
                "variants": [
                    _row(
                        label,
                        [by_name[n] for n in names[bits, group, label]],
                        sizes[names[bits, group, label][0]],
                    )
                    for label, _ in rows
                ],
            }
            for bits, group in grids
        ],
        "layers": layers,
    }


def pages(
    out: Path, *, data: Path | None = None, execution: Execution | None = None
) -> tuple[list[Path], list[str]]:
    """Diagnose the embedded model and PL-BERT, a published looped checkpoint, and write a page for each.

    Parameters
    ----------
    out : Path
        Folder for `NAME.html` and `NAME.json`. It is created if needed.
    data : Path, optional
        Data folder with `models/plbert_kokoro`. Without it PL-BERT is skipped, and the second result says so.
    execution : Execution, optional
        Threads and progress.

    Returns
    -------
    list of Path
        The pages.
    list of str
        Skipped models, with the reason.
    """
    execution = execution or Execution()
    out.mkdir(parents=True, exist_ok=True)
    written, left_out = [], []
    for name, config in PAGES.items():
        if name == PLBERT and (data is None or not (data / "models" / "plbert_kokoro").is_dir()):
            left_out.append(
                f"{name}: no page: its weights are not in {data or 'a data folder'}; give --data DIR or set LOOPQ_DATA"
            )
            continue
        loaded, train, held_out = _prepared(name, data)
        how = execution.changed(batch_size=_PAGE_BATCHES.get(name, execution.batch_size))
        depth = loaded.system.n_steps
        found = diagnose(
            Context(loaded.system, held_out, depth, config, execution=how, train=train), name=name
        )
        written.append(write_page(out / f"{name}.html", diagnosis=found))
        write_data(found, out / f"{name}.json")
    return written, left_out


def _prepared(name: str, data: Path | None) -> tuple[LoadedModel, TokenSet, TokenSet]:
    """Return a page's model, its training prompts, and its diagnosed prompts."""
    takes = dict(zip(("calibration", "evaluation"), _PAGE_TAKES[name], strict=True))
    if name == PLBERT:
        train, held_out = (phonemes(data, use, t.seq_len, t.n_prompts or 1) for use, t in takes.items())
        return load_plbert(data), train, held_out
    loaded = load_model(name)
    return (
        loaded,
        calibration_tokens(loaded, None, takes["calibration"]),
        evaluation_tokens(loaded, None, takes["evaluation"]),
    )


def _redrawn(source: ModelSource, seed: int) -> ModelSource:
    """Return the same source with another seed and new loop metrics."""
    job = dataclasses.replace(source.job, execution=dataclasses.replace(source.execution, seed=seed))
    return dataclasses.replace(source, job=job, metrics={})


def _row(label: str, measurements: Sequence[Measurement], n_bytes: int) -> dict[str, Any]:
    """Summarise a variant by the mean over its measurements. With two or more it adds their standard deviation."""
    mean = {f: np.mean([getattr(m, f) for m in measurements], axis=0) for f in ("kl", "agreement", "nll")}
    summary = dataclasses.replace(measurements[0], name=label, **mean).summary() | {"n_bytes": n_bytes}
    if len(measurements) > 1:
        values = [float(m.kl.mean()) for m in measurements]
        summary |= {"kl_by_metric_seed": values, "kl_sd": float(np.std(values, ddof=1))}
    return summary
