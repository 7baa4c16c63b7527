"""Li, Table 2: the main table, with intervals over prompts and over calibration seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from loopq.paper import main_table, main_text
from loopq.paper.bench import Bench
from loopq.paper.main_table import ALL, ONE, RTN
from loopq.paper.scatter import gain_scatter
from loopq.paper.shown import TABLES, Found, PaperTable, Shown


def measure(bench: Bench) -> dict[str, Any]:
    """Quantize into the three variants on two grids, from several sets of calibration prompts."""
    s = bench.settings
    settings = main_table.Settings(
        n_calibration=s.n_calibration, n_evaluation=s.n_evaluation, seq_len=s.seq_len, n_seeds=s.n_seeds
    )
    settings = settings.of(bench.source.name)
    model = bench.source.prompts(main_table.sizes_of(settings))
    how = bench.execution
    return main_table.measure_model(model, settings, threads=how.threads, progress=how.progress)


def show(founds: Sequence[Found]) -> Shown:
    """Tables, sentences and the scatter of `loopq.paper.main_text`."""
    record = main_text.summarize(founds)
    made, points = [], []
    for found, model in zip(founds, record["models"], strict=True):
        for bits, group in main_table.GRIDS:
            claims = main_text.comparisons(found["model"], main_table.on_grid(found, bits, group))
            made += [
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
    return Shown(main_text.tables(record), made, lambda: [gain_scatter(points)], main_text.headline(record))


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
