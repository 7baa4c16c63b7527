"""The tables of the comparison with other tools."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.evaluation.stats import mcnemar_exact
from loopq.paper.stats import holm

Rows = list[dict[str, Any]]
#: By model and variant.
Means = dict[tuple[str, str], float]
#: A model and a draw of its calibration text: what ratios are taken on, since not every row has every draw.
Unit = tuple[str, int]
ByDraw = dict[tuple[Unit, str], float]
WHAT = """KL to full precision in nats per token on text of another author, two initial states where a model draws them;
means over draws of the calibration text. Other tools run by their own code, except GPTQModel, whose solver is
given the inputs of all calls. "over the best other tool": geometric mean over models, for each over its draws,
of the ratio to the least KL of another tool on the same draw at equal bits (HQQ has more bits). Left out of it
are a model without a result of another tool, and a ratio to or of a KL below 1e-4, where no answer changes; one
with a planted activation or column stands apart. CPU seconds and peak memory of calibration and solve, mean over
models, one thread; memory is what the process takes beyond the loaded model and libraries, and the rows of a tool
share a process, so that what one keeps counts for the next. Other work on the machine makes seconds longer. Other
depths are measured on the same prompts from one initial state, and text of another kind, problems of GSM8K, on as
many; all calibrate on novels."""
#: Nats below which no answer changes, and a ratio is of two nothings; a geometric mean would be of them alone.
LEAST_KL = 1e-4
#: It stores zero points besides: more bits than the others.
NOT_EQUAL = ("HQQ",)
BESIDE = {"kl": "N", "kl_half": "N/2", "kl_double": "2N", "kl_other_text": "GSM8K"}
COSTS = [("seconds", "CPU s", ".1f"), ("memory_mib", "MiB", ".0f")]
TRELLIS = "loopq best, trellis"
SMALL, UNTURNED = "loopq small", "loopq default, not rotated"
PLAIN = "loopq default, no random tokens"
FULL = "full precision"
EVEN = "loopq default, even levels"
OURS_BESIDE = ("loopq fast", "loopq default", PLAIN, "loopq best", TRELLIS)
SEARCHED = "GPTQ, trajectory, searched scales"
#: Rows of the page in docs, in this order. The record has all.
SHOWN = (
    "llm-compressor, mse", "llm-compressor, imatrix_mse", "GPTQModel", SEARCHED,
    "loopq fast", EVEN, "loopq default", "loopq best", TRELLIS, SMALL,
)  # fmt: skip
#: Largest allowed ratio of a row's KL to the best other tool's, or to another row's, by grid.
BARS: tuple[tuple[str, str | None, dict[tuple[int, int], float]], ...] = (
    ("loopq default", None, {(4, 128): 0.75, (4, 32): 0.75, (3, 32): 0.75, (2, 32): 0.75}),
    ("loopq best", None, {(4, 128): 0.40, (4, 32): 0.40, (3, 32): 0.40, (2, 32): 0.33}),
    ("loopq best", SEARCHED, {(3, 32): 0.30, (2, 32): 0.25}),
    (TRELLIS, None, {(4, 128): 0.40, (4, 32): 0.40, (3, 32): 0.40, (2, 32): 0.33}),
    (TRELLIS, SEARCHED, {(3, 32): 0.30, (2, 32): 0.25}),
)


def table(rows: list[dict[str, Any]], columns: list[tuple[str, str, str]]) -> str:
    """Markdown of rows; a column has its key, its heading and its format."""
    lines = ["| " + " | ".join(c[1] for c in columns) + " |", "|" + "---|" * len(columns)]
    lines += [
        "| " + " | ".join(format(r[k], f) if k in r else "" for k, _, f in columns) + " |" for r in rows
    ]
    return "\n".join(lines)


def processor() -> str:
    """Name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def report(records: Rows, settings: dict[str, Any], absent: list[str], ours: list[str]) -> str:
    """Every table: KL of each model, ratios to the best other tool, other depths and texts, intervals and
    refusals."""
    done = [r for r in records if "refused" not in r]
    cpus = ", ".join(dict.fromkeys(r["cpu"] for r in records))
    parts = ["# loopq beside other tools", "", f"{cpus}; settings `{settings}`.", "", WHAT, ""]
    if absent:
        parts += [f"Not run, since there is no environment for it: {', '.join(absent)}.", ""]
    plain, planted = split(done)
    for name, rows in (("", plain), (", planted models", planted)):
        for (bits, group), here in by_grid(rows).items():
            parts += [f"## INT{bits} g{group}{name}", "", _ratios(here, ours), ""]
    title = "## Other depths and other text, ratio to the best other tool there"
    parts += [title, "", _beside(plain, ours), "", "## Bars", "", _bars(plain, ours), ""]
    parts += ["## Intervals over prompts, draw by draw", "", _intervals(done), ""]
    refused = dict.fromkeys(
        f"* {r['variant']}, {r['model']}, INT{r['bits']} g{r['group']}: {r['refused']}"
        for r in records
        if "refused" in r and r["draw"] == records[0]["draw"]
    )
    return "\n".join(parts + (["## Refused", "", *refused] if refused else []))


def page(records: Rows, ours: list[str]) -> str:
    """The part of the record for the page in docs: ratios to the best other tool with their cost."""
    plain, planted = split([r for r in records if "refused" not in r])
    parts = [_summary(plain, ours)]
    if planted:
        parts += ["Planted:", _summary(planted, ours)]
    return "\n\n".join(parts)


def split(rows: Rows) -> tuple[Rows, Rows]:
    """Rows of the models as they are, and of those with something planted."""
    return [r for r in rows if "+" not in r["model"]], [r for r in rows if "+" in r["model"]]


def by_grid(rows: Rows) -> dict[tuple[int, int], Rows]:
    """Rows of each grid."""
    grids: dict[tuple[int, int], Rows] = {}
    for r in rows:
        grids.setdefault((r["bits"], r["group"]), []).append(r)
    return grids


def means(rows: Rows, value: str = "kl") -> Means:
    """Mean over draws, by model and variant."""
    values: dict[tuple[str, str], list[float]] = {}
    for r in rows:
        if r.get(value) is not None:
            values.setdefault((r["model"], r["variant"]), []).append(r[value])
    return {k: float(np.mean(v)) for k, v in values.items()}


def by_draw(rows: Rows, value: str = "kl") -> ByDraw:
    """Values by model, draw and variant."""
    return {((r["model"], r["draw"]), r["variant"]): r[value] for r in rows if r.get(value) is not None}


def best_other(kl_of: ByDraw, ours: list[str]) -> dict[Unit, float]:
    """Least KL of any other tool at equal bits, by model and draw."""
    best: dict[Unit, float] = {}
    for (unit, variant), kl in kl_of.items():
        if variant not in ours and variant not in NOT_EQUAL and np.isfinite(kl):
            best[unit] = min(best.get(unit, np.inf), kl)
    return best


@dataclass(frozen=True)
class Ratio:
    """KL of a variant over another KL: geometric mean over draws, then over models, and the worst model."""

    by_model: Mapping[str, float]

    @classmethod
    def of(cls, kl: ByDraw, variant: str, base: Mapping[Unit, float]) -> Ratio | None:
        """Ratios of the models and draws that have both; None where there is none."""
        logs: dict[str, list[float]] = {}
        for unit in base:
            if (unit, variant) in kl and min(kl[unit, variant], base[unit]) > LEAST_KL:
                logs.setdefault(unit[0], []).append(np.log(kl[unit, variant] / base[unit]))
        return cls({m: float(np.exp(np.mean(of_model))) for m, of_model in logs.items()}) if logs else None

    @property
    def mean(self) -> float:
        """Geometric mean."""
        return float(np.exp(np.mean(np.log(list(self.by_model.values())))))

    @property
    def worst(self) -> str:
        """The largest ratio and its model."""
        model = max(self.by_model, key=lambda m: self.by_model[m])
        return f"{self.by_model[model]:.2f}, {model}"


def _ratios(rows: Rows, ours: list[str]) -> str:
    kl, costs = means(rows), {c: means(rows, c) for c in ("seconds", "memory_mib")}
    drawn = by_draw(rows)
    best = best_other(drawn, ours)
    models, variants = list(dict.fromkeys(m for m, _ in kl)), list(dict.fromkeys(v for _, v in kl))
    lines = []
    for v in variants:
        line: dict[str, Any] = {"variant": v} | {m: kl[m, v] for m in models if (m, v) in kl}
        if ratio := Ratio.of(drawn, v, best):
            line |= {"ratio": ratio.mean, "worst": ratio.worst}
        lines.append(line | _costs(costs, v))
    columns = [
        ("variant", "KL", ""),
        *((m, m, ".3g") for m in models),
        ("ratio", "over the best other tool", ".2f"),
    ]
    return table(lines, [*columns, ("worst", "worst", ""), *COSTS])


def _costs(costs: Mapping[str, Means], variant: str) -> dict[str, float]:
    """CPU seconds and memory of a variant, mean over the models that have them."""
    of_variant = {c: [x for (_, v), x in values.items() if v == variant] for c, values in costs.items()}
    return {c: float(np.mean(values)) for c, values in of_variant.items() if values}


def _summary(rows: Rows, ours: list[str]) -> str:
    grids = by_grid(rows)
    last = next((g for g in ((3, 32), *grids) if g in grids), None)
    lines: dict[str, dict[str, Any]] = {}
    heads = []
    for (bits, group), here in grids.items():
        kl = by_draw(here)
        best = best_other(kl, ours)
        n_models = len({model for model, _ in best})
        name = f"INT{bits} g{group}"
        heads.append((name, f"{name}, {n_models} models" if n_models > 1 else name, ""))
        costs = {c: means(here, c) for c in ("seconds", "memory_mib")}
        for v in SHOWN:
            line = lines.setdefault(v, {"variant": v})
            if ratio := Ratio.of(kl, v, best):
                part = f" of {len(ratio.by_model)}" if len(ratio.by_model) < n_models else ""
                line[name] = f"{ratio.mean:.2f}{part} ({ratio.worst})"
                line |= _costs(costs, v) if (bits, group) == last else {}
    done = [line for line in lines.values() if len(line) > 1]
    heads = [head for head in heads if any(head[0] in line for line in done)]
    cost = [(c, f"{head}, INT{last[0]}" if last else head, form) for c, head, form in COSTS]
    return table(done, [("variant", "KL over the best other tool (worst)", ""), *heads, *cost])


def _bars(rows: Rows, ours: list[str]) -> str:
    lines, grids = [], by_grid(rows)
    for variant, over, bars in BARS:
        line: dict[str, Any] = {"what": f"{variant} over {over or 'the best other tool'}"}
        for grid, bar in bars.items():
            kl = by_draw(grids.get(grid, []))
            base = best_other(kl, ours) if over is None else {u: x for (u, v), x in kl.items() if v == over}
            if ratio := Ratio.of(kl, variant, base):
                within = sum(x <= bar for x in ratio.by_model.values())
                said = "reached" if ratio.mean <= bar else "missed"
                line[str(grid)] = (
                    f"{ratio.mean:.3f}, bar {bar:.2f} {said}; {within} of {len(ratio.by_model)} models"
                )
        lines.append(line)
    return table(lines, [("what", "bar", ""), *((str(g), f"INT{g[0]} g{g[1]}", "") for g in BARS[0][2])])


def _beside(rows: Rows, ours: list[str]) -> str:
    lines = []
    for (bits, group), here in by_grid(rows).items():
        for variant in OURS_BESIDE:
            line: dict[str, Any] = {"grid": f"INT{bits} g{group}", "variant": variant}
            for value in BESIDE:
                kl = by_draw(here, value)
                if ratio := Ratio.of(kl, variant, best_other(kl, ours)):
                    line[value] = f"{ratio.mean:.2f} ({ratio.worst})"
            lines.append(line)
    return table(lines, [("grid", "grid", ""), ("variant", "", ""), *((k, v, "") for k, v in BESIDE.items())])


def _intervals(rows: Rows) -> str:
    lines = []
    for r in rows:
        low, high = r["kl_95"] or (float("nan"),) * 2
        lines.append(r | {"grid": f"INT{r['bits']} g{r['group']}", "interval": f"[{low:.3g}, {high:.3g}]"})
    columns = [
        ("model", "model", ""),
        ("grid", "grid", ""),
        ("variant", "variant", ""),
        ("draw", "draw", "d"),
    ]
    return table(
        sorted(lines, key=lambda r: (r["model"], -r["bits"], -r["group"], r["variant"], r["draw"])),
        [*columns, ("kl", "KL", ".4g"), ("interval", "95 %", ""), ("agreement", "agreement", ".4f")],
    )


ANSWERS = [
    ("grid", "grid", ""), ("draw", "draw", "d"), ("variant", "weights", ""), ("right", "right", ".1%"),
    ("full", "against full precision", ""), ("best", "against the best tool", ""),
]  # fmt: skip


def answers(records: Rows, scores: Rows, ours: list[str]) -> str:
    """Tables of tasks: right answers, and flips against full precision and against the best other tool.

    The p values of all comparisons are one family, adjusted after Holm.
    """
    tables, compared = [], []
    for model, task in dict.fromkeys((r["model"], r["task"]) for r in scores):
        rows = [r for r in scores if (r["model"], r["task"]) == (model, task)]
        full = np.array(next(r["values"] for r in rows if r["variant"] == FULL))
        lines: list[dict[str, Any]] = [{"variant": FULL, "right": full.mean()}]
        for (bits, group), here in by_grid([r for r in rows if r["variant"] != FULL]).items():
            right_of = {(r["draw"], r["variant"]): np.array(r["values"]) for r in here}
            kl = by_draw(by_grid(records)[bits, group])
            for (draw, variant), right in right_of.items():
                others = {
                    v: kl[(model, draw), v] for d, v in right_of if d == draw and v not in (*ours, *NOT_EQUAL)
                }
                best = min(others, key=lambda v: others[v]) if others else variant
                line = {
                    "grid": f"INT{bits} g{group}",
                    "draw": draw,
                    "variant": variant,
                    "right": right.mean(),
                }
                compared.append((line, "full", flips(right, full)))
                if best != variant:
                    compared.append((line, "best", flips(right, right_of[draw, best])))
                lines.append(line)
        tables.append((f"### {task} of {model}, {full.size} items", lines))
    if not tables:
        return ""
    adjusted = holm([mcnemar_exact(*counts) for *_, counts in compared])
    for (line, column, (gained, lost)), p in zip(compared, adjusted, strict=True):
        line[column] = f"{gained} and {lost}, p {p:.2g}"
    parts = [part for title, lines in tables for part in (title, "", table(lines, ANSWERS), "")]
    said = (
        "Against: items right only in this row and only in the other, and the p value of the exact McNemar test, "
        f"adjusted after Holm over the {len(compared)} comparisons of these tables."
    )
    return "\n".join([*parts, said, ""])


def flips(right: NDArray[np.float64], other: NDArray[np.float64]) -> tuple[int, int]:
    """Count the items that only the first of two rows has right, and those that only the second has."""
    return int((right > other).sum()), int((right < other).sum())
