"""The quality table, one command: `python benches/quality/run.py`; a dated record goes to benches/record/."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from pathlib import Path

import loopq
from loopq import zoo
from loopq.reproduce.members import PLBERT, Sizes, load_member
from loopq.reproduce.quality import ARMS, CLOSED, GRIDS, run_member, summary

HERE = Path(__file__).resolve().parent
RECORD = HERE.parent / "record"


def data_folder() -> Path | None:
    folder = Path(os.environ.get("LOOPQ_DATA", HERE.parents[2] / "shared" / "data"))
    return folder if folder.is_dir() else None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("members", nargs="*", help="zoo names, folders, plbert (default: all there are)")
    parser.add_argument("--grid", action="append", help="BITS:GROUP, as in 3:32 (default: 4:128 3:32 2:32)")
    parser.add_argument("--arm", action="append", help="only these rows")
    parser.add_argument("--closed-form", action="store_true", help="leave the gradient tier out")
    parser.add_argument("--n-updates", type=int, default=250)
    parser.add_argument("--n-calibration", type=int, default=Sizes.n_calibration)
    parser.add_argument("--n-evaluation", type=int, default=Sizes.n_evaluation)
    parser.add_argument("--seq-len", type=int, default=Sizes.seq_len)
    parser.add_argument("--n-seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RECORD)
    return parser.parse_args()


def table(rows: list[dict[str, object]], columns: list[tuple[str, str, str]]) -> str:
    lines = ["| " + " | ".join(c[1] for c in columns) + " |", "|" + "---|" * len(columns)]
    lines += [
        "| " + " | ".join(format(r[k], f) if k in r else "" for k, _, f in columns) + " |" for r in rows
    ]
    return "\n".join(lines)


MEMBER_COLUMNS = [
    ("arm", "arm", ""), ("tier", "tier", ""), ("n_bytes", "bytes", ","), ("kl", "KL", ".5f"),
    ("agreement", "agreement", ".4f"), ("gap_closed", "gap closed", ".3f"),
    ("ratio_to_trajectory", "KL / trajectory GPTQ", ".3f"), ("seconds", "s", ".0f"),
]  # fmt: skip
SUMMARY_COLUMNS = [
    ("bits", "bits", "d"), ("group_size", "g", "d"), ("arm", "arm", ""), ("n_members", "members", "d"),
    ("gap_closed_mean", "gap closed", ".3f"), ("gap_closed_worst", "worst", ".3f"), ("worst_member", "of", ""),
    ("ratio_mean", "KL / trajectory GPTQ", ".3f"), ("ratio_worst", "worst", ".3f"),
]  # fmt: skip


def report(records: list[dict[str, object]], settings: dict[str, object]) -> str:
    parts = ["# Quality table", "", "Settings: `" + json.dumps(settings) + "`", ""]
    for key in dict.fromkeys((r["member"], r["bits"], r["group_size"]) for r in records):
        rows = [r for r in records if (r["member"], r["bits"], r["group_size"]) == key]
        what = "" if rows[0]["output"] == "logits" else " (no logits: squared relative error, cosine)"
        parts += [f"## {key[0]}, INT{key[1]} g{key[2]}{what}", "", table(rows, MEMBER_COLUMNS), ""]
    parts += ["## Over members", "", table(summary(records), SUMMARY_COLUMNS), ""]
    return "\n".join(parts)


def write(out: Path, records: list[dict[str, object]], settings: dict[str, object]) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"quality-{datetime.date.today().isoformat()}"
    for suffix, text in ((".json", json.dumps({"settings": settings, "records": records}, indent=1)),
                         (".md", report(records, settings))):  # fmt: skip
        temporary = stem.with_suffix(suffix + ".part")
        temporary.write_text(text + "\n")
        temporary.rename(stem.with_suffix(suffix))
    return stem.with_suffix(".md")


def main() -> None:
    args = parse()
    data = data_folder()
    members = args.members or [*zoo.available(), *([PLBERT] if data else [])]
    grids = [tuple(map(int, g.split(":"))) for g in args.grid] if args.grid else GRIDS
    arms = [
        a
        for a in ARMS
        if not (args.closed_form and a.tier != CLOSED) and (not args.arm or a.name in args.arm)
    ]
    sizes = Sizes(args.n_calibration, 16, args.n_evaluation, args.seq_len)
    settings = {
        "loopq": loopq.__version__, "machine": platform.machine(), "cpus": os.cpu_count(), **vars(sizes),
        "seeds": args.n_seeds, "n_updates": args.n_updates,
    }  # fmt: skip
    records: list[dict[str, object]] = []
    for name in members:
        member = load_member(name, sizes, data)
        records += run_member(
            member,
            grids=grids,
            arms=arms,
            seeds=range(args.n_seeds),
            n_updates=args.n_updates,
            threads=args.threads,
        )
        # Written after every member: a run that is stopped keeps what it has.
        print(f"{name}: {write(args.out, records, settings)}", flush=True)
    print(report(records, settings))


if __name__ == "__main__":
    main()
