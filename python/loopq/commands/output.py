"""Printed output of commands: tables of layers, measurements, checkpoints and dumps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopq.errors import CheckpointError
from loopq.formats.checkpoint import Checkpoint
from loopq.run.outside import LEAST
from loopq.storage.schema import checked
from loopq.terminal.table import render, short, size, some
from loopq.terminal.text import say, visible


@dataclass(frozen=True)
class _Report:
    """Table entries from a layer's report. They are absent if another tool solved the layer."""

    layer: str
    shape: tuple[int, int]
    bits: int
    group_size: int
    n_bytes: int
    method_asked: str | None = None
    method_done: str | None = None
    damping: float | None = None
    n_rows: int | None = None
    steps: tuple[int, ...] = ()
    step_rows: tuple[int, ...] | None = None
    rank: int | None = None
    proxy: float | None = None
    proxy_rtn: float | None = None
    proxy_total: float | None = None
    metric: str | None = None
    n_zeroed_groups: int = 0
    n_subnormal_scales: int = 0
    grid: str | None = None

    def loss(self, value: float | None) -> str | None:
        """A proxy loss relative to the proxy of the weight itself."""
        return short(None if value is None or not self.proxy_total else value / self.proxy_total)


def layer_table(reports: Sequence[dict[str, Any]]) -> str:
    """Return the table of a run with one line per layer, and notes on experts and scales."""
    layers = [checked(_Report, report, "report.jsonl", others=True) for report in reports]
    # A column is left out if no layer has it.
    has = {"metric": any(r.metric for r in layers), "rank": any(r.rank is not None for r in layers)}
    rows = [
        (
            r.layer,
            "x".join(map(str, r.shape)),
            r.method_asked,
            r.method_done,
            *[r.metric or "inputs"] * has["metric"],
            r.grid or f"INT{r.bits}",
            r.group_size if r.group_size != -1 else "row",
            short(r.damping),
            _rows(r.n_rows, r.step_rows),
            spans(r.steps),
            *[r.rank] * has["rank"],
            r.loss(r.proxy_rtn),
            r.loss(r.proxy),
            size(r.n_bytes),
        )
        for r in layers
    ]
    header = (
        "layer", "shape", "asked", "done", *["metric"] * has["metric"], "grid", "group", "damping", "rows", "steps",
        *["rank"] * has["rank"], "loss RTN", "loss", "bytes",
    )  # fmt: skip
    return "\n".join([render(header, rows), *_of_experts(layers), *_of_scales(layers)])


def _rows(total: int | None, by_step: Sequence[int] | None) -> str | int | None:
    """Total number of rows. An expert also has the minimum and the median over steps."""
    if not by_step:
        return total
    return f"{sum(by_step)} ({min(by_step)}, {statistics.median(by_step):g})"


def _of_scales(layers: Sequence[_Report]) -> list[str]:
    """Report on groups with very small weights."""
    zeroed = [f"{r.layer} ({r.n_zeroed_groups})" for r in layers if r.n_zeroed_groups]
    small = [f"{r.layer} ({r.n_subnormal_scales})" for r in layers if r.n_subnormal_scales]
    said = []
    if zeroed:
        said.append(f"groups too near to zero for a scale, rounded to zero: {some(zeroed)}")
    if small:
        said.append(
            "scales below 6.1e-5, which float16 holds with fewer digits and some engines take for zero: "
            f"{some(small)}; --set scale_dtype=bfloat16 holds them"
        )
    return said


def _of_experts(layers: Sequence[_Report]) -> list[str]:
    """Report on experts that received few tokens."""
    experts = [r for r in layers if r.step_rows is not None]
    none = [r.layer for r in experts if not sum(r.step_rows or ())]
    few = [r.layer for r in experts if 0 < sum(r.step_rows or ()) < r.shape[1]]
    # In runs with a loop metric, some experts have none.
    plain = [r.layer for r in experts if r.metric is None and r.layer not in none]
    if all(r.metric is None for r in layers):
        plain = []
    said = ["rows of an expert: in all (fewest of a step, median of the steps)"] * bool(experts)
    for names, what in (
        (
            none,
            "got no row, and are rounded to nearest, which calibration cannot help: take more or other prompts",
        ),
        (few, "got fewer rows than they have inputs: what those do not show is left to the damping of H"),
        (plain, "got rows and no gradient: solved with metric inputs"),
    ):
        if names:
            said.append(f"{len(names)} weights of experts {what}: {some(names)}")
    return said


def spans(steps: Sequence[int]) -> str:
    if not steps:
        return "-"
    spans = []
    start = last = steps[0]
    for step in [*steps[1:], None]:
        if step is None or step != last + 1:
            spans.append(str(start) if start == last else f"{start}-{last}")
            start = step if step is not None else start
        last = step if step is not None else last
    return ",".join(spans)


def measurement_table(summaries: Sequence[dict[str, Any]]) -> str:
    """Return the table of an evaluation, with one line per set of weights and any intervals."""
    hidden = summaries[0]["output"] == "hidden"
    depths: list[str | None] = [str(s["n_steps"]) for s in summaries if "n_steps" in s]
    columns: list[tuple[str, list[str | None]]] = [
        *[("steps", depths)] * bool(depths),
        ("weights", [s["name"] for s in summaries]),
        ("squared relative error" if hidden else "KL (nats)", [divergence(s["kl"]) for s in summaries]),
    ]
    if any("kl_sd" in s for s in summaries):
        columns.append(("sd", [divergence(s["kl_sd"]) if "kl_sd" in s else None for s in summaries]))
    if any(s.get("kl_95") for s in summaries):
        columns.append(("95 %", [_ends(s.get("kl_95")) for s in summaries]))
    if hidden:
        columns.append(("cosine", [f"{s['agreement']:.5f}" for s in summaries]))
    else:
        per_byte = [s["bits_per_byte"] for s in summaries]
        columns += [
            ("agreement", [f"{100 * s['agreement']:.2f} %" for s in summaries]),
            ("perplexity", [f"{s['perplexity']:.4f}" for s in summaries]),
            ("bits/byte", [None if b is None else f"{b:.4f}" for b in per_byte]),
        ]
    runs = [s.get("steps", {"least": 0, "most": 0, "mean": 0.0}) for s in summaries]
    if any(r["least"] != r["most"] for r in runs) or len({r["mean"] for r in runs}) > 1:
        columns.append(("steps run", [f"{r['mean']:.2f} ({r['least']}-{r['most']})" for r in runs]))
    if "tokens_per_second" in summaries[0]:
        speeds = [s["tokens_per_second"] for s in summaries]
        columns.append(("tokens/s", [None if v is None else f"{v:.1f}" for v in speeds]))
    if any("n_bytes" in s for s in summaries):
        columns.append(("bytes", [size(s["n_bytes"]) if "n_bytes" in s else None for s in summaries]))
    return render([head for head, _ in columns], list(zip(*(cells for _, cells in columns), strict=True)))


def spread_table(summaries: Sequence[dict[str, Any]]) -> str:
    """Return the KL figures of llama.cpp's llama-perplexity, one line per set of weights."""
    rows = []
    for s in summaries:
        t = s["tokens"]
        marks = [divergence(v) for v in (t["quantiles"][50], *(t["quantiles"][i] for i in (90, 99, 100)))]
        top = f"{100 * t['same_top']:.3f} ± {100 * t['same_top_error']:.3f} %"
        kl = f"{t['kl']:.6f} ± {t['kl_error']:.6f}"
        rows.append((s["name"], kl, *marks, top, f"{t['perplexity']:.4f}"))
    return render(
        ("weights", "mean KLD", "median", "90 %", "99 %", "maximum", "same top p", "perplexity"), rows
    )


def divergence(value: float) -> str:
    """Five digits after the point, or three significant ones if those would all be zero."""
    return f"{value:.5f}" if value == 0.0 or value >= 5e-4 else f"{value:.2e}"


def _ends(interval: Sequence[float] | None) -> str | None:
    return None if interval is None else f"[{divergence(interval[0])}, {divergence(interval[1])}]"


def print_checkpoint(checkpoint: Any, out: str | None) -> None:
    reports = [
        {**x.report, **x.settings(), "layer": x.name, "n_bytes": x.n_bytes, "grid": x.grid.label}
        for x in checkpoint.layers.values()
    ]
    say(layer_table(reports))
    say("loss: tr(D H D^T) / tr(W H W^T), D the weight error; RTN: the same grid, rounded to nearest")
    packed = sum(layer.n_bytes for layer in checkpoint.layers.values())
    weights = sum(int(layer.codes.size) for layer in checkpoint.layers.values())
    say(
        f"{len(reports)} layers, {weights} weights in {size(packed)}: {8 * packed / weights:.3f} bits a weight; "
        f"the rest of the model: {size(checkpoint.n_bytes - packed)}"
    )
    try:
        lines = extras(checkpoint.settings)
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise CheckpointError(f"settings: damaged: what was chosen cannot be read ({cause!r})") from cause
    say("\n".join(lines), end="\n" if lines else "")
    if out:
        say(f"written to {out}, read back and compared")


def whole(path: Path, checkpoint: Checkpoint, *, rounds_outside: bool) -> str:
    """Return the line about the bytes of all files, and about the setting that makes them smaller."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    n_bytes = sum(file.stat().st_size for file in files)
    text = f"whole of {path}: {size(n_bytes)} ({n_bytes:,} bytes)"
    # Matrices that `--outside` rounds have no smaller side than this.
    matrices = [t for t in checkpoint.dense.values() if len(t.shape) == 2 and min(t.shape) >= LEAST]
    rest = sum(int(t.data.size) for t in matrices)
    if not rounds_outside or 10 * rest < n_bytes:
        return text
    # Codes of 8 bits, and scales of two bytes for groups of 128 or fewer columns.
    saved = rest - sum(int(t.shape[0] * t.shape[1]) for t in matrices)
    return f"{text}, of it {size(rest)} outside the loop; --outside 8 saves about {size(saved)} of them"


def extras(settings: dict[str, Any]) -> list[str]:
    """List the choices of a run, one line each."""
    lines = []
    if "allocation" in settings:
        a = settings["allocation"]
        lines.append(
            f"fit: {size(a['n_bytes'])} of a budget of {size(a['budget_bytes'])}, {a['bits_a_weight']:.3f} bits for "
            f"each weight of the model; predicted KL {a['predicted_cost']:.5f}"
        )
        lines.append(_choices(a))
    return lines


def _choices(allocation: dict[str, Any]) -> str:
    """A line for each set of layers with the same grid, the costliest first."""
    total, rows = allocation["predicted_cost"] or 1.0, []
    for c in sorted(allocation["chosen"], key=lambda c: -c["cost"]):
        name = c["layers"][0] + (f" and {len(c['layers']) - 1} more" if c["layers"][1:] else "")
        if "outside" in c:
            grid = f"outside the loop: {c['outside'] or 'as it was'}" + (" bits" if c["outside"] else "")
        else:
            grid = f"{c['bits']} bits, {c['levels']} levels, groups of {c['group_size']}"
        rows.append(
            (name, grid, size(c["n_bytes"]), divergence(c["cost"]), f"{100 * c['cost'] / total:.1f} %")
        )
    return render(("layers", "chosen", "bytes", "predicted KL", "share"), rows)


def _dumped_rows(parameter: Any, rows: dict[int, int] | None) -> str | int | None:
    counts = rows or {}
    by_step = [counts.get(step, 0) for step in range(parameter.invocations)]
    return _rows(sum(counts.values()) or None, by_step if parameter.routed_in and rows is not None else None)


def print_dump(manifest: Any) -> None:
    rows = [
        (
            p.name,
            f"{p.out_features}x{p.in_features}",
            p.role,
            p.treatment,
            p.invocations,
            manifest.input_groups.get(p.name),
            _dumped_rows(p, manifest.rows.get(manifest.input_groups.get(p.name, ""))),
        )
        for p in manifest.parameters
    ]
    say(render(("layer", "shape", "role", "treatment", "steps", "input of", "rows"), rows))
    cal = manifest.calibration
    total = sum(file.n_bytes for file in (*manifest.files, *manifest.metrics))
    about = (
        f"{manifest.kind} dump of system {manifest.system}, {manifest.n_steps} steps, seed {manifest.seed}; "
        f"{cal['n_prompts']} prompts, {cal['n_tokens']} tokens from {cal['source']}; {size(total)}"
    )
    say(visible(about, one_line=True))
    for entry in manifest.metrics[:1]:
        n_layers = len(manifest.metrics)
        say(
            f"loop metric of {n_layers} layers, {entry.n_prompts} prompts, {entry.n_draws} draws of labels each"
        )
