"""The quality tables, one command: `python -m benches.quality.run`; a dated record goes to benches/record/.

Every (model, draw of calibration prompts, setting) is saved in `.cache/quality` as soon as it is done: an interrupted
run is resumed, and `--only` selects a part.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benches.zoo.register  # noqa: F401  opens the folders of the small models
import loopq
from benches.quality.variants import GRIDS, VARIANTS, SolutionCache, Variant, record_of, related, summary
from benches.zoo import folders
from loopq import zoo
from loopq.calibrate.plbert import PLBERT, data_folder
from loopq.errors import LoopqError
from loopq.paper.models import Sizes, prepare_model

HERE = Path(__file__).resolve().parent
RECORD = HERE.parent / "record"
ROOT = HERE.parents[1]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="huginn_small, folders, plbert (default: all there are)")
    parser.add_argument("--data", type=Path, help="data folder, for plbert (default: LOOPQ_DATA)")
    parser.add_argument("--grid", action="append", help="BITS:GROUP, as in 3:32 (default: 4:128 3:32 2:32)")
    parser.add_argument("--only", action="append", default=[], help="variants whose name contains this")
    parser.add_argument("--tier", action="append", help="only variants of tiers whose name starts with this")
    parser.add_argument("--n-calibration", type=int, default=96)
    parser.add_argument("--n-evaluation", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=Sizes.seq_len)
    parser.add_argument("--draws", type=int, default=3, help="stretches of calibration text, means over them")
    parser.add_argument("--n-seeds", type=int, default=2, help="initial states of the evaluation")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "quality")
    parser.add_argument("--table", action="store_true", help="run nothing: write the results in the cache")
    parser.add_argument("--name", default="quality", help="beginning of the record's name")
    parser.add_argument("--out", type=Path, default=RECORD)
    return parser.parse_args()


class Cache:
    """One JSON file for each result, named by what asked for it."""

    def __init__(self, folder: Path, settings: dict[str, Any], table: bool) -> None:
        self.folder = folder
        self.settings = settings
        self.table = table
        self.refused: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, what: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Return the result kept under `what`, or make and keep it; None where a table run has none."""
        key = json.dumps({**self.settings, **what}, sort_keys=True)
        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"
        if path.is_file():
            kept: dict[str, Any] = json.loads(path.read_text())["result"]
            return kept
        if self.table:
            return None
        try:
            result = make()
        except LoopqError as error:
            # A model that cannot have a variant, for lack of a single-step function for example, is reported.
            print(", ".join(f"{v}" for v in what.values()), f"-> refused: {error}", flush=True)
            self.refused.append(", ".join(f"{v}" for v in what.values()) + f": {error}")
            return None
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"asked": json.loads(key), "result": result}))
        part.rename(path)
        print(", ".join(f"{v}" for v in what.values()), f"-> {result.get('kl', '')}", flush=True)
        return result


def table(rows: list[dict[str, Any]], columns: list[tuple[str, str, str]]) -> str:
    lines = ["| " + " | ".join(c[1] for c in columns) + " |", "|" + "---|" * len(columns)]
    lines += [
        "| " + " | ".join(format(r[k], f) if k in r else "" for k, _, f in columns) + " |" for r in rows
    ]
    return "\n".join(lines)


MODEL_COLUMNS = [
    ("variant", "variant", ""), ("tier", "tier", ""), ("n_bytes", "bytes", ","), ("n_draws", "draws", "d"),
    ("kl", "KL", ".5f"), ("agreement", "agreement", ".4f"), ("gap_closed", "gap closed", ".3f"),
    ("ratio_to_trajectory", "KL / trajectory GPTQ", ".3f"),
]  # fmt: skip
SUMMARY_COLUMNS = [
    ("bits", "bits", "d"), ("group_size", "g", "d"), ("variant", "variant", ""), ("n_models", "models", "d"),
    ("gap_closed_mean", "gap closed", ".3f"), ("gap_closed_worst", "worst", ".3f"), ("worst_model", "of", ""),
    ("ratio_mean", "KL / trajectory GPTQ", ".3f"), ("ratio_worst", "worst", ".3f"), ("ratio_worst_model", "of", ""),
]  # fmt: skip


def report(records: list[dict[str, Any]], settings: Any, refused: list[str]) -> str:
    rows = related(records)
    parts = ["# Quality tables", "", "Settings: `" + json.dumps(settings) + "`", ""]
    if rows:
        parts += ["## Over models", "", table(summary(rows), SUMMARY_COLUMNS), ""]
    for key in dict.fromkeys((r["model"], r["bits"], r["group_size"]) for r in rows):
        mine = [r for r in rows if (r["model"], r["bits"], r["group_size"]) == key]
        what = "" if mine[0]["output"] == "logits" else " (no logits: squared relative error, cosine)"
        parts += [f"## {key[0]}, INT{key[1]} g{key[2]}{what}", "", table(mine, MODEL_COLUMNS), ""]
    if refused:
        parts += ["## Refused", "", "\n".join(f"* {line}" for line in refused), ""]
    return "\n".join(parts)


def write(out: Path, name: str, records: list[dict[str, Any]], settings: Any, refused: list[str]) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"{name}-{datetime.date.today().isoformat()}"
    data = {"settings": settings, "records": records, "refused": refused}
    for suffix, text in (
        (".json", json.dumps(data, indent=1)),
        (".md", report(records, settings, refused)),
    ):
        temporary = stem.with_suffix(suffix + ".part")
        temporary.write_text(text + "\n")
        temporary.rename(stem.with_suffix(suffix))
    return stem.with_suffix(".md")


def wanted(name: str, only: list[str]) -> bool:
    return not only or any(o in name for o in only)


def measure(
    args: argparse.Namespace, cache: Cache, sizes: Sizes, models: list[str], variants: list[Variant]
) -> list[dict[str, Any]]:
    grids = [tuple(map(int, g.split(":"))) for g in args.grid] if args.grid else GRIDS
    records = []
    for draw in range(args.draws):
        for name in models:
            kept: SolutionCache | None = None

            def solutions(name: str = name, draw: int = draw) -> SolutionCache:
                nonlocal kept
                if kept is None:
                    model = prepare_model(name, sizes, data_folder(args.data), draw)
                    kept = SolutionCache(model, args.threads)
                return kept

            for bits, group in grids:
                for variant in variants:
                    what = {
                        "model": Path(name).name,
                        "draw": draw,
                        "bits": bits,
                        "group": group,
                        "variant": variant.name,
                    }
                    found = cache.get(
                        what,
                        lambda v=variant, b=bits, g=group, d=draw, s=solutions: record_of(  # type: ignore[misc]
                            s(), v, b, g, range(args.n_seeds), d
                        ),
                    )
                    if found is not None:
                        records.append(found)
    return records


def main() -> None:
    args = parse()
    sizes = Sizes(args.n_calibration, 32, args.n_evaluation, args.seq_len)
    settings = {"loopq": loopq.__version__, **vars(sizes), "seeds": args.n_seeds}
    cache = Cache(args.cache, settings, args.table)
    data = data_folder(args.data)
    models = args.models or [*zoo.available(), *folders(), *([PLBERT] if data else [])]
    variants = [
        v
        for v in VARIANTS
        if wanted(v.name, args.only) and (not args.tier or any(v.tier.startswith(t) for t in args.tier))
    ]
    machine = {"machine": platform.machine(), "cpus": os.cpu_count()}
    records = measure(args, cache, sizes, models, variants)
    found = (records, settings | machine, cache.refused)
    print(write(args.out, args.name, *found))
    print(report(*found))


if __name__ == "__main__":
    main()
