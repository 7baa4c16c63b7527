"""The experiments past the uniform grid: `python -m benches.next [MODEL ...]` prints the table and writes the record.

Every result is saved in `.cache/next` as soon as it is there: an interrupted run goes on. `--only`, `--grid` and
`--draw` select a part; `--table` writes what is saved without running anything.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benches.next.rows import METHODS, Bench
from benches.next.subject import Subject
from benches.next.table import report, tables
from benches.pages import into
from loopq.paper.models import Sizes, data_folder

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benches" / "record"
MODELS = ("huginn_small", "ouro_small", "parcae_small", "rllama_small", "nanbeige_small")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS), help="names of the zoo")
    parser.add_argument("--draw", action="append", type=int, help="stretches of calibration text (default 0)")
    parser.add_argument("--grid", action="append", type=int, help="bits (default 4 3 2)")
    parser.add_argument("--only", action="append", help=f"methods: {', '.join(METHODS)}")
    parser.add_argument("--n-calibration", type=int, default=32)
    parser.add_argument("--n-evaluation", type=int, default=32)
    parser.add_argument("--data", type=Path, help="data folder, for GSM8K (default: LOOPQ_DATA)")
    parser.add_argument("--table", action="store_true", help="run nothing: write what is saved")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "next")
    parser.add_argument("--out", type=Path, default=RECORD)
    return parser.parse_args()


def path_of(cache: Path, asked: dict[str, Any]) -> Path:
    """Where a result is saved."""
    key = json.dumps(asked, sort_keys=True)
    return cache / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"


def results(args: argparse.Namespace, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Results that are saved; those that are missing are made first, unless a table alone is asked for."""
    for name in args.models:
        for draw in args.draw or ([0, 1, 2] if args.table else [0]):
            bench: Bench | None = None
            for bits in args.grid or (4, 3, 2):
                for method, (_, grids) in METHODS.items():
                    if bits not in grids or (args.only and method not in args.only):
                        continue
                    asked = {
                        "model": name,
                        "draw": draw,
                        "bits": bits,
                        "method": method,
                        "sizes": vars(sizes),
                    }
                    path = path_of(args.cache, asked)
                    if not path.is_file():
                        if args.table:
                            continue
                        bench = bench or Bench(Subject(name, sizes, draw, args.data))
                        result = asked | bench.result(method, bits)
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_text(json.dumps(result))
                        print(name, draw, bits, method, result["n_bytes"], f"{result['kl']:.5f}", flush=True)
                    yield json.loads(path.read_text())


def main() -> None:
    """Run what is missing, print the table, write the record."""
    args = parse()
    torch.set_num_threads(1)
    args.data = data_folder(args.data)
    sizes = Sizes(n_calibration=args.n_calibration, n_evaluation=args.n_evaluation)
    found = list(results(args, sizes))
    text = report(found)
    print(text)
    stem = args.out / f"next-{datetime.date.today().isoformat()}"
    stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text + "\n")
    if args.out == RECORD and found:
        into(ROOT / "docs" / "next.md", "next", tables(found))


if __name__ == "__main__":
    main()
