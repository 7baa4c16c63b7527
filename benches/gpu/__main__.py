"""Everything that runs on a GPU, one section at a time, into one JSON record; `benches/gpu.sh` runs them all.

usage (in the root of the repository): python -m benches.gpu SECTION RECORD [--dry-run] [--seconds S]
                                       python -m benches.gpu rows RECORD

A section adds itself to the record, part by part. `rows` prints what the record says of every target. `--dry-run` runs
a section on tiny models and shapes, with an emulation in the GPU's place: no time that it reports means anything.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benches.gpu import check, decode, phases
from benches.kernels import sections as kernels
from benches.pages import json_lines

SECTIONS: dict[str, kernels.Section] = {
    "check": check.section,
    "decode": decode.section,
    **{name: phases.section(name) for name in phases.RUNS},
    **{name: kernels.section(name) for name in kernels.SECTIONS},
}
ROWS: dict[str, Callable[[dict[str, Any]], kernels.Rows]] = {
    "check": check.rows,
    "decode": decode.rows,
    **dict.fromkeys(phases.RUNS, phases.rows),
    **kernels.ROWS,
}


def machine(dry: bool) -> dict[str, Any]:
    """Where a record was taken."""
    import torch

    gpu = None if dry else torch.cuda.get_device_properties(0)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": "emulation" if gpu is None else gpu.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "multiprocessors": 0 if gpu is None else gpu.multi_processor_count,
    }


def add_section(path: Path, machine: dict[str, Any], section: str, data: dict[str, Any]) -> None:
    """Put a section into the record, whole or not at all."""
    record = json.loads(path.read_text()) if path.exists() else {**machine, "sections": {}}
    other = {key: record.get(key) for key in machine if record.get(key) != machine[key]}
    if other:
        raise SystemExit(f"{path} was taken with {other}, this is {machine}: give another file")
    record["sections"][section] = data
    scratch = path.with_suffix(".part")
    scratch.write_text(json_lines(record, 3) + "\n")
    scratch.replace(path)


def run_section(name: str, path: Path, dry: bool, seconds: float) -> None:
    """Run a section; what it has found by then is in the record whenever it is stopped."""
    began, taken_on = time.monotonic(), machine(dry)

    def keep(data: dict[str, Any]) -> None:
        add_section(path, taken_on, name, {**data, "seconds": round(time.monotonic() - began, 1)})

    SECTIONS[name](seconds, dry, keep)
    print(f"{name}: {time.monotonic() - began:.0f} s -> {path}")


def rows(record: dict[str, Any]) -> kernels.Rows:
    """Target, what was measured, and whether it is met; sections that are missing stay open."""
    lines: kernels.Rows = []
    for section, judge in ROWS.items():
        data = record["sections"].get(section)
        lines += [(section, "not in the record", "open")] if data is None else judge(data)
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("section", choices=[*SECTIONS, "rows", "note"])
    parser.add_argument("record", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="what a section that can stop early keeps to"
    )
    parser.add_argument("--note", nargs=2, metavar=("TOOL", "VERDICT"), help="of the sanitizer, for `note`")
    args = parser.parse_args(argv)
    if args.section == "rows":
        record = json.loads(args.record.read_text())
        if record["device"] == "emulation":
            print("A DRY RUN: no time below means anything.\n")
        print(f"{record['device']}, {record['date']}\n\n| target | measured | |\n|---|---|---|")
        for row in rows(record):
            print(f"| {' | '.join(row)} |")
    elif args.section == "note":
        record = json.loads(args.record.read_text())
        taken_on = {key: value for key, value in record.items() if key != "sections"}
        tool, verdict = args.note
        notes = record["sections"].get("sanitizer", {})
        add_section(args.record, taken_on, "sanitizer", {**notes, tool: verdict})
    else:
        run_section(args.section, args.record, args.dry_run, args.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
