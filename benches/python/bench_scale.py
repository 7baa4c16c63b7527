"""How cost and memory grow: rows, columns, and the largest layers of a looped model.

    python benches/python/bench_scale.py --record FILE.json --plot FILE.png

Hessian time over rows (a line of slope 1 on logarithmic axes) and over columns (2), factor and eigenvalue time over
columns (3); and the peak memory of factor and solve on 5280 x 10560 and 5280 x 17920 as a multiple of H.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from loopq import _native
from record import factored, write

SOLVE = """
import sys, time, numpy as np
from loopq import _native
def peak():
    # Of this process alone: what getrusage gives is no less than what the process that started it held.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
m, dim, precision = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rng = np.random.default_rng(0)
common = rng.standard_normal(dim, dtype=np.float32)
h = np.empty((dim, dim), np.float32 if precision == "float32" else np.float64)
np.multiply(common[:, None], common[None], out=h)
h.flat[:: dim + 1] += rng.random(dim) + 1
w = rng.standard_normal((m, dim), dtype=np.float32)
before = peak()
start = time.perf_counter()
threads = int(sys.argv[4])
factor = _native.DampedFactor(h, np.full(dim, 0.01 * float(np.diag(h).mean())), precision=precision, threads=threads)
got = _native.gptq(w, factor, bits=4, group_size=128, threads=threads)
took = time.perf_counter() - start
assert np.isfinite(got["proxy"]) and got["codes"].shape == w.shape
print(took, peak() / h.nbytes, before / h.nbytes)
"""


def best(run: Callable[[], object], n: int = 3) -> float:
    """Seconds of the fastest of `n` runs."""
    taken = []
    for _ in range(n):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)


def hessian(dim: int, rows: np.ndarray, threads: int) -> None:
    """Rows to a finished Hessian."""
    made = _native.HessianAccumulator(dim, [0], per_step=False, threads=threads)
    made.update(0, rows)
    made.finish()


def gram(dim: int) -> np.ndarray:
    """A well-conditioned Hessian with a common part."""
    common = np.random.default_rng(0).standard_normal(dim)
    return np.outer(common, common) + np.diag(np.random.default_rng(1).random(dim) + 1)


def slope(points: list[tuple[int, float]]) -> float:
    """Exponent of a power law through points, by least squares on logarithms."""
    x, y = (np.log([p[i] for p in points]) for i in (0, 1))
    return float(np.polyfit(x, y, 1)[0])


def curves(threads: int) -> dict[str, list[tuple[int, float]]]:
    """Measure all curves."""
    bits = np.random.default_rng(0).integers(0x3C00, 0x4000, (65536, 2048), dtype=np.uint16)
    wide = bits[:4096].reshape(2048, 4096)
    made: dict[str, list[tuple[int, float]]] = {}
    made["Hessian, 2048 columns, over rows"] = [
        (n, best(partial(hessian, 2048, bits[:n], threads))) for n in (4096, 8192, 16384, 32768, 65536)
    ]
    points = []
    for dim in (1024, 2048, 4096, 5280):
        rows = np.resize(wide, (16384, dim))
        points.append((dim, best(partial(hessian, dim, rows, threads))))
    made["Hessian, 16384 rows, over columns"] = points
    for precision in ("float32", "float64"):
        points = []
        for dim in (1024, 2048, 4096, 5280):
            make = partial(factored, gram(dim), precision, threads)
            points.append((dim, best(make)))
        made[f"factor in {precision}, over columns"] = points
    made["eigenvalues, over columns"] = [
        (d, best(partial(_native.eigvalsh, gram(d), threads=threads), 1)) for d in (512, 1024, 2048, 4096)
    ]
    return made


def memory(threads: int) -> list[dict[str, Any]]:
    """Peak memory of the largest layers, each in a process of its own."""
    rows = []
    for m, dim in ((5280, 10560), (5280, 17920)):
        for precision in ("float32", "float64"):
            command = [sys.executable, "-c", SOLVE, str(m), str(dim), precision, str(threads)]
            took, peak, before = subprocess.run(
                command, check=True, capture_output=True, text=True
            ).stdout.split()
            rows.append({
                "m": m, "dim": dim, "precision": precision, "seconds": float(took), "peak_over_h": float(peak),
                "before_over_h": float(before),
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    return rows


def plot(made: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Draw time over rows and over columns, with the law beside it."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter, NullLocator

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for (name, points), marker in zip(made.items(), "osD^v", strict=True):
        axis = axes[0 if "over rows" in name else 1]
        label = (
            f"{name.removesuffix(', over columns').removesuffix(', over rows')}: exponent {slope(points):.2f}"
        )
        axis.loglog(*zip(*points, strict=True), marker=marker, label=label)
    axes[0].set(xlabel="rows", ylabel="seconds", title="over rows (1 expected)")
    axes[1].set(
        xlabel="columns d", ylabel="seconds", title="over columns (Hessian 2, factor and eigenvalues 3)"
    )
    for axis, wanted in zip(axes, ("over rows", "over columns"), strict=True):
        places = sorted({n for name, points in made.items() if wanted in name for n, _ in points})
        axis.set_xticks(places, [f"{n:,}" for n in places], fontsize=8)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(True, which="both", alpha=0.3)
        axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print, plot and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    made = curves(args.threads)
    for name, points in made.items():
        print(f"{name}: exponent {slope(points):.2f}  {[(n, round(s, 3)) for n, s in points]}", flush=True)
    if args.plot:
        plot(made, args.plot)
    rows = memory(args.threads)
    assert all(math.isfinite(r["peak_over_h"]) for r in rows)
    write(args.record, {"curves": made, "memory": rows}, threads=args.threads)


if __name__ == "__main__":
    main()
