"""A dump of Huginn's size from rows to INT4 codes: its 17 shared projections, 93,408 rows each.

    python benches/python/bench_huginn.py --work FOLDER [--threads 2] [--rows 93408] [--record FILE]

The rows are made layer by layer, bf16 with a common part as looped states have, and removed after use, so that
FOLDER needs room for the largest layer only (3.4 GB). The time for making them is not counted: it stands for the GPU
box. What is counted: memory-mapped rows to Hessian, Hessian to factor, factor to codes. The adapter and the four
layers of the four blocks follow the model's configuration (width 5280, MLP 17,920, adapter 10,560 wide).
"""

from __future__ import annotations

import argparse
import json
import resource
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np

from loopq import _native
from record import factored, write

BLOCK = [
    ("attn.Wqkv", 15840, 5280),
    ("attn.proj", 5280, 5280),
    ("mlp.fc", 35840, 5280),
    ("mlp.proj", 5280, 17920),
]
LAYERS = [("adapter", 5280, 10560)] + [(f"core_block.{b}.{n}", m, d) for b in range(4) for n, m, d in BLOCK]


def make_rows(path: Path, n: int, dim: int, seed: int) -> None:
    """Write a tensor "rows" of (n, dim) bf16: noise and a common direction whose size differs from row to row."""
    header = {"rows": {"dtype": "BF16", "shape": [n, dim], "data_offsets": [0, 2 * n * dim]}}
    text = json.dumps(header).encode()
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(dim, dtype=np.float32)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, n, 4096):
            count = min(4096, n - start)
            rows = rng.standard_normal((count, dim), dtype=np.float32)
            rows += rng.standard_normal((count, 1), dtype=np.float32) * common
            file.write((rows.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def solve(path: Path, name: str, m: int, dim: int, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Rows to codes; the seconds of each stage."""
    w = np.random.default_rng(seed + 1000).standard_normal((m, dim), dtype=np.float32)
    marks = [time.perf_counter()]
    sums = _native.HessianAccumulator(dim, [0], per_step=False, threads=args.threads)
    sums.update_file(0, path, "rows")
    sums.finish()
    marks.append(time.perf_counter())
    h = sums.matrix()
    del sums
    marks.append(time.perf_counter())
    factor = factored(h, args.precision, args.threads)
    marks.append(time.perf_counter())
    got = _native.gptq(w, factor, bits=4, group_size=128, threads=args.threads)
    marks.append(time.perf_counter())
    assert got["codes"].shape == (m, dim)
    assert np.abs(got["codes"]).max() <= 8
    assert np.isfinite(got["proxy"])
    stages = dict(
        zip(("hessian", "matrix", "factor", "solve"), np.diff(marks).round(3).tolist(), strict=True)
    )
    return {"layer": name, "m": m, "dim": dim, **stages}


def main() -> None:
    """Run all layers; a layer that the record already holds is not run again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=93408)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=("float32", "float64"), default="float64")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    if args.record and args.record.exists():
        results = json.loads(args.record.read_text(encoding="utf-8"))["results"]["layers"]
    done = {r["layer"] for r in results}
    for seed, (name, m, dim) in enumerate(LAYERS):
        if name in done:
            continue
        path = args.work / "rows.safetensors"
        make_rows(path, args.rows, dim, seed)
        try:
            results.append(solve(path, name, m, dim, args, seed))
        finally:
            path.unlink()
        print(json.dumps(results[-1]), flush=True)
        total = {s: round(sum(r[s] for r in results), 1) for s in ("hessian", "matrix", "factor", "solve")}
        summary = {
            "layers": results, "seconds": total, "minutes": round(sum(total.values()) / 60, 2),
            "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        }  # fmt: skip
        write(args.record, summary, threads=args.threads, rows=args.rows, precision=args.precision)
    print(json.dumps({k: v for k, v in summary.items() if k != "layers"}))


if __name__ == "__main__":
    main()
