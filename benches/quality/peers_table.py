"""The tables of the comparison with other tools."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np

from benches.quality.run import table

Rows = list[dict[str, Any]]
WHAT = """KL to full precision in nats per token on text of another author, two initial states where a model draws
them; means over draws of the calibration text. Other tools run by their own code, except GPTQModel, whose solver is
given the inputs of all calls. "over the best other tool": geometric mean over models of the ratio to the least KL of
another tool at equal bits (HQQ has more bits); a model without a result of another tool is left out. CPU seconds of
calibration and solve, one thread, no model loading; other work on the machine makes them longer. Other depths and
other text are measured on eight prompts: a trend, not a ranking."""
#: It stores zero points besides: more bits than the others.
NOT_EQUAL = ("HQQ",)
BESIDE = {"kl": "N", "kl_half": "N/2", "kl_double": "2N", "kl_other_text": "GSM8K"}


def processor() -> str:
    """Name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def report(records: Rows, settings: dict[str, Any], absent: list[str], ours: list[str]) -> str:
    """Every table: KL of each model, ratios to the best other tool, other depths and text, intervals, refusals."""
    done = [r for r in records if "refused" not in r]
    parts = ["# loopq beside other tools", "", f"{processor()}; settings `{settings}`.", "", WHAT, ""]
    if absent:
        parts += [f"Not run, since there is no environment for it: {', '.join(absent)}.", ""]
    for bits, group in dict.fromkeys((r["bits"], r["group"]) for r in done):
        here = [r for r in done if (r["bits"], r["group"]) == (bits, group)]
        parts += [f"## INT{bits} g{group}", "", _ratios(here, ours), ""]
    parts += [
        "## Other depths and other text, ratio to the best other tool there",
        "",
        _beside(done, ours),
        "",
    ]
    parts += ["## Intervals over prompts, draw by draw", "", _intervals(done), ""]
    refused = dict.fromkeys(
        f"* {r['variant']}, {r['model']}, INT{r['bits']} g{r['group']}: {r['refused']}"
        for r in records
        if "refused" in r and r["draw"] == records[0]["draw"]
    )
    return "\n".join(parts + (["## Refused", "", *refused] if refused else []))


def means(rows: Rows, value: str = "kl") -> dict[tuple[str, str], float]:
    """Mean over draws, by model and variant."""
    found: dict[tuple[str, str], list[float]] = {}
    for r in rows:
        if value in r:
            found.setdefault((r["model"], r["variant"]), []).append(r[value])
    return {k: float(np.mean(v)) for k, v in found.items()}


def best_other(found: dict[tuple[str, str], float], ours: list[str]) -> dict[str, float]:
    """Least KL of any other tool at equal bits, by model."""
    best: dict[str, float] = {}
    for (model, variant), kl in found.items():
        if variant not in ours and variant not in NOT_EQUAL and np.isfinite(kl):
            best[model] = min(best.get(model, np.inf), kl)
    return best


def _ratios(rows: Rows, ours: list[str]) -> str:
    kl, seconds = means(rows), means(rows, "seconds")
    best = best_other(kl, ours)
    models, variants = list(dict.fromkeys(m for m, _ in kl)), list(dict.fromkeys(v for _, v in kl))
    lines = []
    for v in variants:
        ratio = {m: kl[m, v] / best[m] for m in best if (m, v) in kl and best[m] > 0}
        line: dict[str, Any] = {"variant": v} | {m: kl[m, v] for m in models if (m, v) in kl}
        if ratio:
            worst = max(ratio, key=lambda m: ratio[m])
            line["ratio"] = float(np.exp(np.mean(np.log(list(ratio.values())))))
            line["worst"] = f"{ratio[worst]:.2f}, {worst}"
        line["seconds"] = float(np.mean([seconds[m, v] for m in models if (m, v) in seconds]))
        lines.append(line)
    columns = [
        ("variant", "KL", ""),
        *((m, m, ".3g") for m in models),
        ("ratio", "over the best other tool", ".2f"),
    ]
    return table(lines, [*columns, ("worst", "worst", ""), ("seconds", "CPU s", ".1f")])


def _beside(rows: Rows, ours: list[str]) -> str:
    lines = []
    for bits, group in dict.fromkeys((r["bits"], r["group"]) for r in rows):
        here = [r for r in rows if (r["bits"], r["group"]) == (bits, group)]
        for variant in ("loopq fast", "loopq default", "loopq best"):
            line: dict[str, Any] = {"grid": f"INT{bits} g{group}", "variant": variant}
            for value in BESIDE:
                kl = means(here, value)
                best = best_other(kl, ours)
                ratios = [kl[m, variant] / best[m] for m in best if (m, variant) in kl and best[m] > 0]
                if ratios:
                    line[value] = f"{np.exp(np.mean(np.log(ratios))):.2f} (worst {max(ratios):.2f})"
            lines.append(line)
    return table(lines, [("grid", "grid", ""), ("variant", "", ""), *((k, v, "") for k, v in BESIDE.items())])


def _intervals(rows: Rows) -> str:
    found = []
    for r in rows:
        low, high = r["kl_95"] or (float("nan"),) * 2
        found.append(r | {"grid": f"INT{r['bits']} g{r['group']}", "interval": f"[{low:.3g}, {high:.3g}]"})
    columns = [
        ("model", "model", ""),
        ("grid", "grid", ""),
        ("variant", "variant", ""),
        ("draw", "draw", "d"),
    ]
    return table(
        sorted(found, key=lambda r: (r["model"], -r["bits"], -r["group"], r["variant"], r["draw"])),
        [*columns, ("kl", "KL", ".4g"), ("interval", "95 %", ""), ("agreement", "agreement", ".4f")],
    )
