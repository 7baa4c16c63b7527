"""KL against CPU seconds, by the amount of text and of gradients: `python -m benches.quality.curve MODEL ...`.

Every row is the default method with some prompts and some draws of labels for each, with even and with uneven levels.
CPU seconds count collecting, gradients and solving on one thread. Each row is kept in .cache/curve, and an interrupted
run is resumed. MODEL, `--calibration`, `--text` and `--draw` are those of `benches.quality.peers`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from pathlib import Path
from typing import Any

from benches.pages import RECORD, ROOT
from benches.quality.peers import Bench
from benches.quality.peers_table import processor
from loopq.calibrate.prompts import RANDOM_TOKENS
from loopq.paper.models import Sizes
from loopq.run.auto import choose_metric
from loopq.run.config import QuantConfig
from loopq.run.solving import solve_from

LEVELS = ("even", "uneven")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["huginn_small", "ouro_small"])
    parser.add_argument("--amount", action="append", help="PROMPTSxDRAWS (default 32x1 32x4 64x1 96x1)")
    parser.add_argument("--grid", default="3:64", help="BITS:GROUP (default %(default)s)")
    parser.add_argument("--draw", action="append", type=int, help="stretches of calibration text (default 0)")
    parser.add_argument("--n-evaluation", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--calibration", type=Path, help="text to calibrate on (default: the one that ships)")
    parser.add_argument("--text", type=Path, help="text to measure on (default: the one that ships)")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("LOOPQ_DATA", "../shared/data")))
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "curve")
    parser.add_argument("--out", type=Path, default=RECORD)
    args = parser.parse_args()
    args.threads = 1
    args.amounts = [tuple(map(int, a.split("x"))) for a in args.amount or ("32x1", "32x4", "64x1", "96x1")]
    return args


def measure(bench: Bench, n_draws: int, bits: int, group: int) -> dict[str, dict[str, Any]]:
    """Quantize with each kind of levels, from the same sums, and measure."""
    share = RANDOM_TOKENS
    source, sums, collecting = bench.sums(share)
    lines, weights = [], {}
    for number, levels in enumerate(LEVELS):
        config = QuantConfig.of(
            bits=bits, group_size=group, rank_threshold=None, metric_draws=n_draws, levels=levels
        )
        plan = choose_metric(source.plan(config), source.job)
        gradients = bench.metric_costs(plan, source, sums, share)
        with bench.costs() as solving:
            layers = solve_from(plan, source, sums)
        weights[number] = {n: x.in_model_orientation() for n, x in layers.items()}
        parts = {
            "collect": collecting.seconds,
            "gradients": sum(g.seconds for g in gradients),
            "solve": solving.seconds,
        }
        lines.append({"seconds": sum(parts.values()), "parts": parts})
    return dict(zip(LEVELS, bench.measured(lines, weights), strict=True))


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every result, measured unless it is kept."""
    found = []
    bits, group = map(int, args.grid.split(":"))
    args.cache.mkdir(parents=True, exist_ok=True)
    for model in args.models:
        for n_prompts, n_draws in args.amounts:
            for draw in args.draw or [0]:
                name = Path(model).name
                kept = args.cache / f"{name}-{bits}-{group}-{n_prompts}x{n_draws}-{draw}.json"
                if not kept.exists():
                    sizes = Sizes(n_prompts, 16, args.n_evaluation, args.seq_len)
                    key = {"model": name, "n_prompts": n_prompts, "n_draws": n_draws, "draw": draw}
                    results = measure(Bench(model, draw, args, sizes), n_draws, bits, group)
                    lines = [key | {"levels": levels} | row for levels, row in results.items()]
                    kept.write_text(json.dumps(lines, indent=1))
                found += json.loads(kept.read_text())
                print(*((r["levels"], round(r["seconds"]), r["kl"]) for r in found[-2:]), kept, flush=True)
    return found


def page(args: argparse.Namespace, results: list[dict[str, Any]]) -> str:
    """The record."""
    texts = [file.name if file else "the text that ships" for file in (args.calibration, args.text)]
    lines = [
        f"# KL against CPU seconds, {datetime.date.today()}", "",
        f"`python -m benches.quality.curve`: INT{args.grid.replace(':', ' g')}, prompts of {args.seq_len} tokens, "
        f"calibrated on {texts[0]}, KL on {args.n_evaluation} of {texts[1]}, one thread of {processor()}, "
        f"beside other work. Means over {len(args.draw or [0])} stretches of text. CPU seconds by part.", "",
        "| model | prompts | draws | collect | gradients | solve, even | uneven | all, even | KL, even | KL, uneven |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    keys = dict.fromkeys((r["model"], r["n_prompts"], r["n_draws"]) for r in results)
    for model, n_prompts, n_draws in keys:
        same = [
            r for r in results if (r["model"], r["n_prompts"], r["n_draws"]) == (model, n_prompts, n_draws)
        ]

        def mean(levels: str, part: str, rows: list[dict[str, Any]] = same) -> float:
            chosen = [r["parts"].get(part, r.get(part)) for r in rows if r["levels"] == levels]
            return sum(chosen) / len(chosen)

        costs = [mean("even", "collect"), mean("even", "gradients"), mean("even", "solve")]
        costs += [mean("uneven", "solve"), sum(costs)]
        numbers = " | ".join(f"{c:.0f}" for c in costs)
        lines.append(
            f"| {model} | {n_prompts} | {n_draws} | {numbers} | {mean('even', 'kl'):.4f} | "
            f"{mean('uneven', 'kl'):.4f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    args = parse()
    results = rows(args)
    text = page(args, results)
    stem = args.out / f"curve-int{args.grid.replace(':', '-g')}-{datetime.date.today()}"
    stem.with_suffix(".md").write_text(text, "utf-8")
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
