"""Models that take no token ids: a forecaster of time series and a flow of points, with one call for each step.

`python -m benches.quality.calls [--draws N] [fracast | flow ...]` quantizes both by rounding, by GPTQ from one step and
from all, and by loopq's presets, at 4 and 3 bits, and writes benches/record and the tables of
docs/howto/batches.md. The forecaster is the package `fracast` with its trained weights; real series are data files of
the package `statsmodels`. Both come by pip. The flow is trained here, in seconds.

All rows but the first have searched scales. `--tools` instead adds rows of other tools on the forecaster to the
newest record. `make peers` makes their environments, and `benches.quality.peer` says how each is called.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import loopq
from benches.pages import RECORD, ROOT, into, json_lines
from benches.quality.peers import answer_of, python_of
from benches.quality.peers_table import processor, table
from benches.zoo.forecaster import Batch, Forecaster, held_out, synthetic
from loopq.calibrate.calls import CallSet
from loopq.calibrate.prompts import evaluation_tokens
from loopq.evaluation.compare import Measurement, compare
from loopq.evaluation.stats import bootstrap
from loopq.models.from_python import wrap
from loopq.paper.models import Sizes

PAGE = ROOT / "docs" / "howto" / "batches.md"
VARIANTS: dict[str, dict[str, Any]] = {
    "rounding, scales of the largest weight": {"method": "rtn", "scale_search": "max"},
    "rounding": {"method": "rtn"},
    "GPTQ, one step": {"method": "gptq", "steps": "first"},
    "GPTQ, all steps": {"method": "gptq"},
    "loopq, preset fast": {"preset": "fast"},
    "loopq, even levels": {"levels": "even"},
    "loopq": {},
}
#: Rows and what each is divided by, window by window.
PAIRS = (
    ("GPTQ, one step", "rounding"),
    ("GPTQ, all steps", "GPTQ, one step"),
    ("loopq", "GPTQ, all steps"),
    ("loopq", "loopq, even levels"),
)
LLM, EXL3 = "llm-compressor", "GPTQModel, EXL3"
#: Rows of other tools on the forecaster.
TOOLS = {
    "llmcompressor": (LLM, f"{LLM}, mse", f"{LLM}, imatrix_mse", f"{LLM}, no wrapper"),
    "autoround": ("auto-round", "auto-round, best"),
    "gptqmodel": ("GPTQModel", EXL3),
}
#: Rows of loopq that stand beside other tools.
OURS = ("loopq, even levels", "loopq")
#: A control: noise of this share of a weight's size, from so many draws.
SHARE, N_SHAKEN = 0.05, 4
NOISE = f"float32, noise of {SHARE:.0%} on the looped weights"
BITS: tuple[Literal[4, 3], ...] = (4, 3)
GROUP = 32
EULER = 24


@dataclass(frozen=True)
class Subject:
    """A model with its batches. `scores` names what `score` returns; `kinds` has the kind of each held-out batch."""

    model: nn.Module
    calibrations: Callable[[int], list[Any]]
    held: list[Any]
    kinds: list[str]
    scores: str
    score: Callable[[Any, Any], float]


def fracast() -> Subject:
    """Fracast-0, with synthetic series to calibrate on and others to measure on."""
    model = Forecaster()
    held, labels = held_out()
    levels = torch.tensor(model.quantiles)

    def quantile_loss(output: Tensor, batch: Batch) -> float:
        short = batch["future"][..., None] - output
        return float(torch.maximum(levels * short, (levels - 1) * short).nanmean()) * 2

    return Subject(
        model,
        lambda draw: synthetic(32, draw),
        held,
        labels,
        "quantile loss",
        quantile_loss,
    )


class Flow(nn.Module):
    """Euler steps from noise to points, with one network for all times."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2 + 16, width), nn.Linear(width, 2)
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.register_buffer("rates", 2.0 ** torch.arange(8))

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """The velocity of points (n, 2) at times (n, 1)."""
        angles = t * self.rates
        x = self.first(torch.cat([x, angles.sin(), angles.cos()], 1))
        for layer in self.inner:
            x = x + layer(nn.functional.silu(x))
        out: Tensor = self.last(nn.functional.silu(x))
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Move noise (n, 2) along the flow."""
        for i in range(EULER):
            x = x + self.velocity(x, torch.full_like(x[:, :1], i / EULER)) / EULER
        return x


def checkerboard(n: int, generator: torch.Generator) -> Tensor:
    """Points on the dark squares of a board of four by four."""
    x, y = torch.rand(2, n, generator=generator) * 4
    y = (y / 4 * 2).floor() * 2 + y % 1 + x.floor() % 2
    return torch.stack([x, y], 1) - 2


def trained_flow(n_steps: int = 4000) -> Flow:
    """Train the flow by conditional flow matching, in about 20 seconds on one core."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Flow()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
    for _ in range(n_steps):
        data, noise = checkerboard(512, generator), torch.randn(512, 2, generator=generator)
        t = torch.rand(512, 1, generator=generator)
        moved = model.velocity(noise + t * (data - noise), t)
        loss = (moved - (data - noise)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def flow() -> Subject:
    """The flow, with noise to calibrate on and other noise to measure on."""

    def noise(n: int, points: int, seed: int) -> list[tuple[Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        return [(torch.randn(points, 2, generator=generator),) for _ in range(n)]

    def off(output: Tensor, batch: tuple[Tensor]) -> float:
        """Share of points beside the dark squares. Of points anywhere on the board it is a half."""
        at = (output + 2).floor()
        dark = (at >= 0) & (at < 4)
        return 1 - float((dark.all(1) & (at.sum(1) % 2 == 0)).float().mean())

    held = noise(32, 256, 10_000)
    return Subject(
        trained_flow(),
        lambda draw: noise(64, 64, draw),
        held,
        ["noise"] * len(held),
        "points off the squares",
        off,
    )


SUBJECTS = {"fracast": fracast, "flow": flow}


def shaken(subject: Subject, names: Sequence[str]) -> dict[str, list[float]]:
    """Error and score of each held-out batch with random noise on the looped weights: how sensitive the batch is."""
    found = np.zeros((2, len(subject.held)))
    for seed in range(N_SHAKEN):
        generator, other = torch.Generator().manual_seed(seed), copy.deepcopy(subject.model)
        with torch.no_grad():
            for name in names:
                weight = other.get_parameter(name)
                size = SHARE * weight.square().mean().sqrt()
                weight += size * torch.randn(weight.shape, generator=generator)
            for i, batch in enumerate(subject.held):
                both = [m(**batch) if isinstance(batch, dict) else m(*batch) for m in (subject.model, other)]
                error = (both[1] - both[0]).square().sum() / both[0].square().sum()
                found[:, i] += np.array([float(error), subject.score(both[1], batch)]) / N_SHAKEN
    return {key: [float(f"{v:.5g}") for v in row] for key, row in zip(("error", "score"), found, strict=True)}


def values(m: Measurement) -> dict[str, list[float]]:
    """Error and score of each held-out batch."""
    return {key: [float(f"{v:.5g}") for v in getattr(m, key)[0]] for key in ("error", "score")}


def others(name: str, asked: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of other tools from the first draw of calibration batches; what a tool refuses has its message."""
    subject = SUBJECTS[name]()
    loaded = wrap(subject.model)
    tokens = evaluation_tokens(loaded, subject.held)
    assert isinstance(tokens, CallSet)
    tokens, system = dataclasses.replace(tokens, score=subject.score), loaded.system
    names = [p.name for p in system.shared_parameters(system.n_steps) if p.treatment != "dense"]
    job = {
        "model": name, "sizes": vars(Sizes(len(subject.calibrations(0)), 1, 2)), "draw": 0, "names": names,
        "data": None, "texts": [None, None], "dtype": None, "threads": 1,
    }  # fmt: skip
    rows = []
    for tool, known in TOOLS.items():
        variants = [v for v in known if v in asked and python_of(tool).is_file()]
        if not variants:
            print(f"{tool}: left out, since it is not asked for or {python_of(tool)} is not made")
            continue
        results = [(v, bits, 0 if v == EXL3 else GROUP) for bits in BITS for v in variants]
        lines, weights = answer_of(tool, job | {"results": results})
        found = compare(system, {str(n): w for n, w in weights.items()}, tokens) if weights else []
        measured = {m.name: m for m in found}
        for number, ((variant, bits, _), line) in enumerate(zip(results, lines, strict=True)):
            row = {"model": name, "tool": tool, "variant": variant, "draw": 0, "bits": bits}
            if "refused" in line:
                rows.append(row | {"refused": line["refused"]})
                continue
            seconds, own = {"seconds": round(line["seconds"], 1)}, values(measured[str(number)])
            rows.append(row | seconds | own | {"kinds": subject.kinds})
            print(name, bits, variant, f"{np.median(own['error']):.4f}", flush=True)
    return rows


def run(name: str, draws: int) -> list[dict[str, Any]]:
    """Rows of a subject: the error and the score of each held-out batch, for each variant."""
    subject = SUBJECTS[name]()
    rows = []

    def row(m: Any, variant: str, **more: Any) -> None:
        rows.append({"model": name, "variant": variant, **more, **values(m), "kinds": subject.kinds})

    def measured(model: nn.Module, results: dict[str, Any]) -> list[Any]:
        return loopq.evaluate(model, results, subject.held, score=subject.score, threads=1)

    for draw in range(draws):
        batches = subject.calibrations(draw)
        for bits in BITS:
            for variant, options in VARIANTS.items():
                began = time.process_time()
                with warnings.catch_warnings():
                    # The depthwise kernels, which the page names.
                    warnings.filterwarnings("ignore", "not quantized")
                    made = loopq.quantize(
                        subject.model, batches, bits=bits, group_size=GROUP, threads=1, **options
                    )
                seconds = time.process_time() - began
                full, found = measured(subject.model, {variant: made})
                if not rows:
                    row(full, "float32", draw=0, bits=32)
                    noise = {"model": name, "variant": NOISE, "draw": 0, "bits": 32}
                    rows.append(noise | shaken(subject, [*made.layers]) | {"kinds": subject.kinds})
                row(found, variant, draw=draw, bits=bits, seconds=round(seconds, 1))
                said = f"{found.error.mean():.4f} {found.score.mean():.4f}"
                print(name, bits, draw, variant, said, flush=True)
    return rows


def part(row: dict[str, Any], kind: str, what: str) -> NDArray[np.float64]:
    """Values of the batches of a kind."""
    return np.array([v for v, k in zip(row[what], row["kinds"], strict=True) if k.startswith(kind)])


def shown(value: float) -> str:
    """A mean with two or more digits."""
    return f"{value:.4f}" if value >= 1e-3 or not value else f"{value:.1e}"


def results(rows: Sequence[dict[str, Any]], model: str, score: str) -> str:
    """One row for each variant, with the first draw of calibration batches."""
    chosen = [r for r in rows if r["model"] == model and r["draw"] == 0 and "tool" not in r]
    kinds = list(dict.fromkeys(k.partition(":")[0] for k in chosen[0]["kinds"]))
    of = f": {', '.join(kinds)}" if len(kinds) > 1 else ""
    lines = []
    for r in chosen:
        bits = f"{r['bits']} bits: " if r["bits"] < 32 else ""
        error, own = (
            ", ".join(shown(part(r, kind, what).mean()) for kind in kinds) for what in ("error", "score")
        )
        lines.append(
            {"weights": bits + r["variant"], "error": error, "score": own, "s": r.get("seconds", "")}
        )
    columns = [("weights", "weights", ""), ("error", f"relative square error{of}", "")]
    return table(lines, [*columns, ("score", f"{score}{of}", ""), ("s", "CPU s", "")])


def paired(rows: Sequence[dict[str, Any]], model: str) -> str:
    """Ratios of two rows, batch by batch: the median with its interval, and how many batches are better."""
    by_name = {(r["bits"], r["variant"]): r for r in rows if r["model"] == model and r["draw"] == 0}
    lines = [
        {"pair": f"{top} over {bottom}"} | {str(b): over(by_name[b, top], by_name[b, bottom]) for b in BITS}
        for top, bottom in PAIRS
    ]
    heads = [(str(bits), f"{bits} bits: median (95 %), better in", "") for bits in BITS]
    return table(lines, [("pair", "error of", ""), *heads])


def over(top: dict[str, Any], bottom: dict[str, Any]) -> str:
    """The median of the ratio of two rows' errors with its interval, and in how many batches the first is smaller."""
    a, b = (np.array(row["error"]) for row in (top, bottom))
    ratio = bootstrap([a / b], lambda r, axis: np.median(r, axis))
    return f"{ratio.estimate:.2f} ({ratio.low:.2f}-{ratio.high:.2f}), {int((a < b).sum())} of {a.size}"


def beside(rows: Sequence[dict[str, Any]], model: str) -> str:
    """Rows of other tools with loopq's beside them, and a line for each refusal."""
    here = [r for r in rows if r["model"] == model and r["draw"] == 0]
    ours = {(r["bits"], r["variant"]): r for r in here if r["variant"] in OURS}
    lines, refused = [], dict[str, list[str]]()
    for r in (r for r in here if "tool" in r):
        if "refused" in r:
            refused.setdefault(f"* {r['variant']}: `{r['refused']}`", []).append(f"{r['bits']} bits")
            continue
        line = {
            "weights": f"{r['bits']} bits: {r['variant']}",
            "s": r["seconds"],
            "error": shown(np.median(r["error"])),
        }
        line |= {variant: over(ours[r["bits"], variant], r) for variant in OURS}
        lines.append(line)
    heads = [(variant, f"{variant} over it: median (95 %), better in", "") for variant in OURS]
    columns = [
        ("weights", "weights", ""),
        ("error", "relative square error, median", ""),
        *heads,
        ("s", "CPU s", ""),
    ]
    said = [f"{text} ({', '.join(bits)})" for text, bits in refused.items()]
    return "\n".join([table(lines, columns), *([""] if said else []), *said])


def pages(data: dict[str, Any]) -> dict[tuple[Path, str], str]:
    """Each table by its page and its mark."""
    texts = {}
    for name, score in (("fracast", "quantile loss"), ("flow", "points off the squares")):
        if any(r["model"] == name for r in data["rows"]):
            texts[PAGE, name] = f"{results(data['rows'], name, score)}\n\n{paired(data['rows'], name)}"
    if any("tool" in r for r in data["rows"]):
        texts[PAGE, "fracast-tools"] = beside(data["rows"], "fracast")
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: both")
    parser.add_argument("--draws", type=int, default=1, help="sets of calibration batches")
    every = [variant for variants in TOOLS.values() for variant in variants]
    parser.add_argument(
        "--tools", nargs="*", metavar="ROW", choices=every, help="of other tools; default: all"
    )
    parser.add_argument("--out", type=Path, help="default: a new record")
    args = parser.parse_args()
    if args.tools is not None:
        rows = others("fracast", args.tools or every)
        out = max(RECORD.glob("calls-*.json"))
        data = json.loads(out.read_text("utf-8"))
        made = {r["variant"] for r in rows}
        data["rows"] = [r for r in data["rows"] if r["variant"] not in made] + rows
        data |= {
            "command of other tools": "python -m benches.quality.calls --tools",
            "cpu of other tools": processor(),
        }
    else:
        names = args.models or [*SUBJECTS]
        out = args.out or RECORD / f"calls-{datetime.date.today()}.json"
        rows = [row for name in names for row in run(name, args.draws)]
        command = f"python -m benches.quality.calls --draws {args.draws} {' '.join(names)}"
        data = {
            "command": command,
            "cpu": processor(),
            "loopq": loopq.__version__,
            "group": GROUP,
            "rows": rows,
        }
    out.write_text(json_lines(data) + "\n", "utf-8")
    if args.out is None:
        for (page, mark), text in pages(data).items():
            into(page, mark, text)


if __name__ == "__main__":
    main()
