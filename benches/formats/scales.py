"""What scales of few significant bits cost: KL to full precision, as solved and as deployed in bfloat16.

Run: python benches/formats/scales.py [MODEL] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import loopq
from loopq.api import weights_of
from loopq.calibrate.collect import Collection, collect_hessians
from loopq.calibrate.data import windows
from loopq.calibrate.prompts import Take, calibration_tokens
from loopq.calibrate.select import select
from loopq.evaluate.compare import compare
from loopq.models.load import load_model
from loopq.storage.files import float_to_raw
from loopq.terminal.table import render
from loopq.zoo import evaluation_text

GRIDS = ((2, 32), (3, 32), (4, 32), (4, 128), (8, 128))


def kinds(bits: int) -> list[tuple[str, str, int | None]]:
    """Scale types to compare: whole ones, and those whose product with a code is exact in 16 bits."""
    # A signed code has bits - 1 significant bits; a product has those of both factors.
    return [
        ("float32", "float32", None),
        ("float16", "float16", None),
        ("bfloat16", "bfloat16", None),
        (f"float16, {12 - bits} bits", "float16", 12 - bits),
        (f"bfloat16, {9 - bits} bits", "bfloat16", 9 - bits),
    ]


def as_bfloat16(weights: dict[str, Any]) -> dict[str, Any]:
    """Weights rounded as a bfloat16 model holds them."""
    return {name: float_to_raw(w, "BF16").float32() for name, w in weights.items()}


def measure(model: str, n_calibration: int, n_evaluation: int, seeds: int) -> list[dict[str, Any]]:
    """Quantize with each kind of scale, from the same Hessians, and compare on held-out text."""
    loaded = load_model(model)
    calibration = calibration_tokens(loaded, None, Take(n_calibration))
    job = Collection(
        loaded.system, calibration, select(loaded.system, calibration), side_files=loaded.side_files
    )
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / "dump"
        collect_hessians(job, dump)
        return _compare(loaded, dump, n_evaluation, seeds)


def _compare(loaded: Any, dump: Path, n_evaluation: int, seeds: int) -> list[dict[str, Any]]:
    held_out = windows(
        evaluation_text().decode(), loaded.encode, 128, n_evaluation, "embedded evaluation text"
    )
    results = []
    for bits, group_size in GRIDS:
        variants: dict[str, dict[str, Any]] = {}
        changed = {}
        for label, dtype, kept in kinds(bits):
            settings: dict[str, Any] = {
                "bits": bits,
                "group_size": group_size,
                "scale_dtype": dtype,
                "scale_bits": kept,
            }
            weights = weights_of(loopq.solve(dump, **settings, rank_threshold=None))
            deployed = as_bfloat16(weights)
            variants[label], variants[f"{label} deployed"] = weights, deployed
            changed[label] = sum(int((weights[n] != deployed[n]).sum()) for n in weights)
        # Full precision comes first.
        measured = compare(loaded.system, variants, held_out, seeds=range(seeds))[1:]
        kl = {m.name: np.asarray(m.kl, dtype=np.float64).ravel() for m in measured}
        for label, _, kept in kinds(bits):
            # The same prompts and initial states in both: the difference is paired.
            difference = kl[label] - kl["float16"]
            entry = {
                "bits": bits,
                "group_size": group_size,
                "scales": label,
                "scale_bits": kept,
                "kl": float(kl[label].mean()),
                "kl_deployed": float(kl[f"{label} deployed"].mean()),
                "difference": float(difference.mean()),
                "standard_error": float(difference.std(ddof=1) / np.sqrt(difference.size)),
                "weights_changed": changed[label],
            }
            results.append(entry)
    return results


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="huginn_small")
    parser.add_argument("--n-calibration", type=int, default=64)
    parser.add_argument("--n-evaluation", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = measure(args.model, args.n_calibration, args.n_evaluation, args.seeds)
    rows = [
        (
            f"INT{r['bits']}",
            r["group_size"],
            r["scales"],
            f"{r['kl']:.6f}",
            f"{r['difference']:+.6f} ± {r['standard_error']:.6f}",
            f"{r['kl_deployed']:.6f}",
            r["weights_changed"],
        )
        for r in results
    ]
    header = (
        "grid",
        "group",
        "scales",
        "KL",
        "KL against float16",
        "KL in bfloat16",
        "weights that bfloat16 changes",
    )
    print(render(header, rows))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
