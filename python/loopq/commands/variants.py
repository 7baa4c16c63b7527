"""Variants on the embedded model: rounding, GPTQ, another tool's rules, and loopq, on the same grids."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loopq.calibrate.prompts import CalibrationTake, Take, calibration_tokens, evaluation_tokens
from loopq.errors import ConfigError
from loopq.evaluation.compare import Measurement, compare
from loopq.formats.checkpoint import Checkpoint, weights_of
from loopq.models.load import load_model
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
    ("loopq, even levels", {"levels": "even"}),
    ("loopq", {}),
)
BEST = ("loopq, preset best", dict(PRESETS["best"]))
GRIDS = ((4, 32), (3, 32))
CALIBRATION, EVALUATION = CalibrationTake(64), Take(32)


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
        Bits and group size of each grid.
    seeds, metric_seeds : sequence of int
        Initial states of the evaluation, and initial states and drawn labels of the loop metric. Variants with the loop
        metric are solved once per seed, and their figures are means.
    calibration, evaluation : Take
        Number and length of prompts. Variants without the loop metric use the unchanged text.

    Returns
    -------
    dict
        "reference" is the measurement of full precision. "grids" has those of the variants, with bytes, and with
        "kl_by_metric_seed" and "kl_sd" where a loop metric has several draws. "layers" are reports of the last variant.

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
    sources = [ModelSource.of(loaded.system, text, execution=execution) for text in (changed, plain)]
    solved = list(_solved(sources, metric_seeds, grids, (*VARIANTS, BEST) if best else VARIANTS))
    weights = {str(n): weights_of(one.checkpoint) for n, one in enumerate(solved)}
    reference, *measured = compare(
        loaded.system, weights, held_out, seeds=seeds, count_bytes=loaded.count_bytes, execution=execution
    )
    n_bytes = sum(t.data.size for t in sources[0].weights.tensors.values())
    return {
        "model": loaded.report.source,
        "n_steps": loaded.system.n_steps,
        "calibration": changed.describe(),
        "evaluation": held_out.describe(),
        "seeds": list(seeds),
        "metric_seeds": list(metric_seeds),
        "reference": reference.summary() | {"n_bytes": n_bytes},
        "grids": [_grid(*grid, solved, measured) for grid in grids],
        "layers": _reports(solved, grids[0]),
    }


@dataclass(frozen=True)
class _Solved:
    """A row of the table on one grid, for one draw of the loop metric's labels."""

    grid: tuple[int, int]
    label: str
    checkpoint: Checkpoint


def _solved(
    sources: Sequence[ModelSource],
    metric_seeds: Sequence[int],
    grids: Sequence[tuple[int, int]],
    rows: Sequence[tuple[str, Mapping[str, Any]]],
) -> Iterator[_Solved]:
    """Solve every row on every grid. Only rows with the loop metric have draws, and the changed text."""
    source, others = sources
    sums, sums_of_others = (s.all_steps(s.plan(QuantConfig())) for s in sources)
    drawn = [_redrawn(source, seed) for seed in metric_seeds]
    tensors = source.weights.tensors
    for bits, group_size in grids:
        for label, settings in rows:
            asked = source.plan(QuantConfig.of(**settings, bits=bits, group_size=group_size))
            config = choose_metric(asked, source.job).config
            ours = config.layer.method.gradients
            for one in drawn if ours else [others]:
                layers = solve_from(one.plan(config), one, sums if ours else sums_of_others)
                dense = {k: v for k, v in tensors.items() if k not in layers}
                checkpoint = Checkpoint(layers, dense, dict(source.weights.ties), {})
                yield _Solved((bits, group_size), label, checkpoint)


def _grid(
    bits: int, group_size: int, solved: Sequence[_Solved], measured: Sequence[Measurement]
) -> dict[str, Any]:
    """Return the rows of one grid."""
    rows: dict[str, list[Measurement]] = {}
    sizes: dict[str, int] = {}
    for one, measurement in zip(solved, measured, strict=True):
        if one.grid == (bits, group_size):
            rows.setdefault(one.label, []).append(measurement)
            sizes.setdefault(one.label, one.checkpoint.n_bytes)
    variants = [_row(label, measurements, sizes[label]) for label, measurements in rows.items()]
    return {"bits": bits, "group_size": group_size, "variants": variants}


def _reports(solved: Sequence[_Solved], grid: tuple[int, int]) -> list[dict[str, Any]]:
    """Return the layer reports of the last row of a grid, of its first draw."""
    of_grid = [one for one in solved if one.grid == tuple(grid)]
    last = next(one for one in of_grid if one.label == of_grid[-1].label)
    return [
        {"layer": layer.name, **layer.report, "grid": layer.grid.label}
        for layer in last.checkpoint.layers.values()
    ]


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
