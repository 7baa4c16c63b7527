"""Levels of a table beside even ones, with the same solver, bytes and preset: `python -m benches.levels --model MODEL`.

MODEL is a folder (`python -m benches.zoo.smollm2 fetch` makes the default), a name of the zoo, or "plbert". Groups have
32 columns. Loop metric and Hessians are collected once. Results are kept in the record and not measured again.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

from benches.cost import add_common, parsed, written
from benches.gguf import Kept
from benches.quality.peers_table import processor
from loopq.run.config import PRESETS, QuantConfig

SETTINGS: dict[str, dict[str, Any]] = {"default": {"metric": "loop"}, "best": dict(PRESETS["best"])}
LEVELS = ("even", "uneven", "fitted")
#: Most KL over that of even levels.
BARS = {True: 0.55, False: 0.85}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser, n_calibration=32)
    parser.add_argument("--names", default="", help="regular expression of the matrices (default: all)")
    parser.add_argument("--preset", action="append", choices=SETTINGS, help="(default: default)")
    parser.add_argument("--bits", action="append", type=int, choices=(4, 3, 2), help="(default: 4 and 3)")
    parser.add_argument("--levels", action="append", choices=LEVELS, help="(default: all)")
    return parsed(parser)


def page(runs: dict[str, dict[str, Any]]) -> str:
    """The record."""
    lines = [
        f"# Levels of a table beside even ones, {datetime.date.today()}", "",
        "`python -m benches.levels`, groups of 32, one thread. KL (95 % over prompts), and over even levels.", "",
        "| model | bits | preset | even | uneven | fitted | uneven | fitted | bar |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for run in runs.values():
        for bits, preset in dict.fromkeys((r["bits"], r["preset"]) for r in run["rows"]):
            by_levels = {r["levels"]: r for r in run["rows"] if (r["bits"], r["preset"]) == (bits, preset)}
            cells = [
                f"{r['kl']:.2e} ({r['kl_95'][0]:.2e}-{r['kl_95'][1]:.2e})" if r else ""
                for r in map(by_levels.get, LEVELS)
            ]
            ratios = [
                f"{by_levels[k]['kl'] / by_levels['even']['kl']:.2f}" if {k, "even"} <= set(by_levels) else ""
                for k in LEVELS[1:]
            ]
            bar = BARS["looped" in run["model"]]
            lines.append(f"| {run['model']} | {bits} | {preset} | {' | '.join(cells + ratios)} | {bar} |")
    notes = [
        f"* {r['model']}: {r['matrices']} matrices, {r['prompts']}, {r['processor']}." for r in runs.values()
    ]
    return "\n".join([*lines, "", *notes, ""])


def main() -> None:
    args = parse()
    stored = args.out / f"levels-{datetime.date.today()}.json"
    runs = json.loads(stored.read_text("utf-8")) if stored.is_file() else {}
    bench = Kept(args)
    bench.collect()
    name = Path(args.model).name
    sizes = f"{args.n_calibration} x {args.seq_len} tokens to calibrate, {args.n_evaluation} x {args.seq_len} others"
    run = runs.setdefault(f"{name} {args.names} {args.n_calibration}", {
        "model": name, "matrices": len(bench.source.plan(QuantConfig()).tasks), "processor": processor(),
        "prompts": sizes, "rows": [],
    })  # fmt: skip
    for preset in args.preset or ["default"]:
        for bits in args.bits or (4, 3):
            for levels in args.levels or LEVELS:
                key = {"bits": bits, "preset": preset, "levels": levels}
                if any(key.items() <= row.items() for row in run["rows"]):
                    continue
                weights = bench.solved(
                    QuantConfig.of(bits=bits, group_size=32, **SETTINGS[preset] | {"levels": levels})
                )
                run["rows"].append(key | bench.measured([{}], {0: weights})[0])
                print(name, run["rows"][-1], flush=True)
                stored.write_text(json.dumps(runs, indent=1) + "\n", "utf-8")
                written(args.out, "levels", page(runs))
    print(page(runs))


if __name__ == "__main__":
    main()
