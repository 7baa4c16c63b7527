"""Hessian and solver beside what a user would run instead, in one process, interleaved.

    python benches/python/bench_core.py [--threads 2] [--pairs 5] [--record FILE]

Every row is the median over pairs of runs, one of loopq and one of the yardstick right after each other, so that a
busy machine weighs on both. Answers are checked before times are taken. The yardsticks are torch's float32 ``X.T @ X``,
its matrix products, and GPTQ as published, written here in torch. That GPTQ has two Cholesky factorisations with an
inverse between, blocks of 128 columns, and one torch call per column.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import factored, write

from loopq import _native

GRID = _native.Grid(bits=4, group_size=128)


def pairs(ours: Callable[[], object], theirs: Callable[[], object], n: int) -> dict[str, float]:
    """Run both `n` times in turns; median seconds and median ratio, and the ratio of the shortest times."""
    times: list[tuple[float, float]] = []
    for i in range(n):
        order = (ours, theirs) if i % 2 == 0 else (theirs, ours)
        taken = []
        for run in order:
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
        times.append((taken[0], taken[1]) if i % 2 == 0 else (taken[1], taken[0]))
    return {
        "loopq_s": statistics.median(t[0] for t in times),
        "other_s": statistics.median(t[1] for t in times),
        "speedup": statistics.median(t[1] / t[0] for t in times),
        "speedup_of_minima": min(t[1] for t in times) / min(t[0] for t in times),
    }


def torch_gptq(w: torch.Tensor, h: torch.Tensor, group: int, damping: float) -> torch.Tensor:
    """GPTQ as published, 4 bits symmetric; gives the codes."""
    w, h, dim = w.clone(), h.clone(), h.shape[0]
    h[range(dim), range(dim)] += damping * torch.mean(torch.diag(h))
    u = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    codes = torch.zeros_like(w)
    for b0 in range(0, dim, 128):
        b1 = min(b0 + 128, dim)
        block, errors = w[:, b0:b1].clone(), torch.zeros(w.shape[0], b1 - b0)
        for i in range(b1 - b0):
            if (b0 + i) % group == 0:
                end = b0 + i + group
                now = block[:, i:group] if end <= b1 else torch.cat((block[:, i:], w[:, b1:end]), 1)
                scale = now.abs().amax(1) / 7
            column = block[:, i]
            codes[:, b0 + i] = torch.clamp(torch.round(column / scale), -8, 7)
            error = (column - codes[:, b0 + i] * scale) / u[b0 + i, b0 + i]
            block[:, i:] -= error.unsqueeze(1) * u[b0 + i, b0 + i : b1].unsqueeze(0)
            errors[:, i] = error
        w[:, b1:] -= errors @ u[b0:b1, b1:]
    return codes


def bench_hessian(dim: int, n: int, dtype: str, threads: int, n_pairs: int) -> list[dict[str, Any]]:
    """Rows to Hessian against ``X.T @ X``, and against the rate of torch's own product of the type."""
    x = torch.randn(n, dim)
    rows = x.numpy() if dtype == "float32" else x.bfloat16().view(torch.uint16).numpy()
    exact = x if dtype == "float32" else x.bfloat16().float()

    def ours() -> _native.HessianAccumulator:
        hessian = _native.HessianAccumulator(dim, [0], per_step=False, threads=threads)
        hessian.update(0, rows)
        hessian.finish()
        return hessian

    error = np.abs(ours().matrix() - (exact.T @ exact).numpy()).max()
    assert error < 1e-3 * n, error
    against = pairs(ours, lambda: exact.T @ exact, n_pairs)
    a = torch.randn(dim, dim).to(torch.float32 if dtype == "float32" else torch.bfloat16)
    rate = pairs(ours, lambda: a @ a, n_pairs)
    share = (n * dim * (dim + 1) / 2) / dim**3 * rate["speedup"]
    return [{
        "what": "hessian", "dim": dim, "rows": n, "dtype": dtype, **against, "share_of_torch_matmul_rate": share,
    }]  # fmt: skip


def bench_solve(m: int, dim: int, precision: str, threads: int, n_pairs: int) -> dict[str, Any]:
    """Factor and solve, W and H given: 4 bits, groups of 128."""
    x = torch.randn(dim, dim)
    h, w = x.T @ x / dim + 1.0, torch.randn(m, dim)
    hn, wn = h.numpy(), w.numpy()

    def ours() -> dict[str, Any]:
        return _native.gptq(wn, factored(hn, precision, threads), GRID, threads=threads)

    same = float((torch_gptq(w, h, 128, 0.01).numpy() == ours()["codes"]).mean())
    assert same > 0.9, same
    timed = pairs(ours, lambda: torch_gptq(w, h, 128, 0.01), n_pairs)
    return {"what": "solve", "m": m, "dim": dim, "precision": precision, **timed, "same_codes": same}


def bench_rank(m: int, dim: int, threads: int, n_pairs: int) -> list[dict[str, Any]]:
    """The rank of H by counting, against all eigenvalues, and against the factor and solve of a layer."""
    x = np.random.default_rng(0).standard_normal((2 * dim, dim), np.float32) * np.logspace(
        0, -3, dim, dtype=np.float32
    )
    mixed = x.copy()
    for shift in (1, 7, 61):
        mixed += np.roll(x, shift, axis=1)
    hessian = _native.HessianAccumulator(dim, [0], per_step=False, threads=threads)
    hessian.update(0, mixed)
    hessian.finish()
    h, w = hessian.matrix(), np.random.default_rng(1).standard_normal((m, dim), np.float32)
    ranks: list[int] = []

    def ours() -> None:
        ranks.append(_native.count_above(h, [1e-3], threads)[1][0])

    def spectrum() -> None:
        values = _native.eigvalsh(h, threads)
        ranks.append(int((values > 1e-3 * values[-1]).sum()))

    def solve() -> None:
        _native.gptq(w, factored(h, "float64", threads), GRID, threads=threads)

    against = pairs(ours, spectrum, 1 if dim > 2048 else n_pairs)
    assert len(set(ranks)) == 1, ranks
    beside = pairs(ours, solve, n_pairs)
    row = {"what": "rank", "m": m, "dim": dim, "rank": ranks[0]}
    return [{**row, "against": "eigvalsh", **against}, {**row, "against": "factor and gptq", **beside}]


def main() -> None:
    """Run the benches and print or record them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--dims", type=int, nargs="*", default=[2048, 5280, 10560])
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--shapes", nargs="*", default=["2048x2048", "5632x2048", "2048x5632"])
    parser.add_argument("--ranks", nargs="*", default=["2048x2048", "5280x5280"])
    parser.add_argument("--note", default="", help="what else the machine did")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results: list[dict[str, Any]] = []
    for dim in args.dims:
        for dtype in ("bfloat16", "float32"):
            results += bench_hessian(dim, args.rows, dtype, args.threads, args.pairs)
            print(json.dumps(results[-1]), flush=True)
    for shape in args.shapes or []:
        m, dim = (int(v) for v in shape.split("x"))
        for precision in ("float32", "float64"):
            results.append(bench_solve(m, dim, precision, args.threads, args.pairs))
            print(json.dumps(results[-1]), flush=True)
    for shape in args.ranks or []:
        m, dim = (int(v) for v in shape.split("x"))
        for row in bench_rank(m, dim, args.threads, args.pairs):
            results.append(row)
            print(json.dumps(row), flush=True)
    write(
        args.record, results, threads=args.threads, pairs=args.pairs, torch=torch.__version__, note=args.note
    )


if __name__ == "__main__":
    main()
