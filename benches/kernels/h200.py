"""One section of the GPU measurements, written as JSON. `run_h200.sh` runs them all.

usage: python benches/kernels/h200.py SECTION OUT_FOLDER
"""

from __future__ import annotations

import datetime
import importlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

try:
    importlib.import_module("loopq._native")
except ImportError:
    # The kernels need no compiled extension: where it cannot be loaded, its version number is all that is
    # missed.
    stand_in = types.ModuleType("loopq._native")
    stand_in.__version__ = "0"
    sys.modules["loopq._native"] = stand_in

from loopq.kernels import bench, bench_products, bench_rollout
from loopq.kernels.load import Backend, CudaBackend, cuda_backend
from loopq.kernels.shapes import HUGINN, MODELS, Projection

DEVICE = torch.device("cuda", 0)
SMALL = bench_rollout.LoopSize(width=480, heads=5, inner=1280, blocks=2)


def exact() -> dict[str, Any]:
    """51 comparisons with float64, for both ways of bringing weights in, and edges at other group sizes."""
    backend = cuda_backend(0)
    records: dict[str, Any] = {}
    for name, bulk in (("cp_async", False), ("bulk", True)):
        found = bench.verify_products(backend, HUGINN, DEVICE, bulk=bulk)
        records[name] = {
            "comparisons": len(found),
            "worst_float32": max(r["error_float32"] for r in found),
            "worst_rounded": max(r["error_rounded"] for r in found),
            "worst_bfloat16": max(r["error_bfloat16"] for r in found),
            "all_repeatable": all(r["repeatable"] for r in found),
            "all_same_in_batch": all(r["same_in_batch"] for r in found),
            "all": found,
        }
    edges = [Projection("edge", k, n, 1) for k, n in ((32, 16), (96, 48), (5280, 5296), (10560, 16))]
    for group in (32, 64, 128, 256, -1):
        found = bench.verify_products(backend, edges, DEVICE, tokens=(1, 8, 9, 24, 33, 64), group_size=group)
        records[f"edges_g{group}"] = {
            "worst_float32": max(r["error_float32"] for r in found),
            "comparisons": len(found),
        }
    return records


def small() -> dict[str, Any]:
    """A small case of everything, for compute-sanitizer."""
    backend = cuda_backend(0)
    layers = [Projection("small", 1312, 336, 1)]
    found = [
        bench.verify_products(backend, layers, DEVICE, tokens=(1, 7, 16, 40), bulk=bulk)
        for bulk in (False, True)
    ]
    rollout = bench_rollout.verify_rollout(backend, DEVICE, size=SMALL, n_steps=2, graphs=False)
    return {"products": found, "rollout": rollout}


def rollout_exact() -> dict[str, Any]:
    """544 products in 32 steps; replay equals eager; overlapping launches give the same bits."""
    size = bench_rollout.LoopSize()
    plain = bench_rollout.verify_rollout(cuda_backend(0), DEVICE, size=size, n_steps=32)
    return {"huginn": plain, "overlap_same_bits": _overlap_same_bits(size)}


def _overlap_same_bits(size: bench_rollout.LoopSize) -> bool:
    parts = bench_rollout.random_parts(size, DEVICE, quantized=True)
    results = []
    for overlap in (False, True):
        runner = bench_rollout.RolloutRunner(parts, CudaBackend(0, overlap=overlap))
        runner.capture(1, 7, 32)
        for seed in range(3):
            state, embedding = bench_rollout.random_inputs(size, 7, DEVICE, seed)
            results.append(runner.run(state, embedding, 32, graph=True))
    return all(torch.equal(a, b) for a, b in zip(results[:3], results[3:], strict=True))


def products() -> dict[str, Any]:
    """Bandwidth shares and cuBLAS ratios of Huginn's products, for both ways of bringing weights in."""
    backend = cuda_backend(0)
    bandwidth = bench.copy_bandwidth(DEVICE)
    return {
        name: bench_products.compare_products(backend, HUGINN, DEVICE, bulk=bulk, bandwidth=bandwidth)
        for name, bulk in (("cp_async", False), ("bulk", True))
    }


def models() -> dict[str, Any]:
    """The other looped models' products."""
    backend: Backend = cuda_backend(0)
    bandwidth = bench.copy_bandwidth(DEVICE)
    return {
        name: bench_products.compare_products(backend, layers, DEVICE, bandwidth=bandwidth)
        for name, layers in MODELS.items()
        if name != "huginn-3.5b"
    }


def sweep() -> dict[str, Any]:
    """Other cuts than the planner's."""
    return {"cuts": bench_products.sweep_cuts(cuda_backend(0), HUGINN, DEVICE)}


def threshold() -> dict[str, Any]:
    """Kernel against dequantise-and-multiply, to place config.INT4_KERNEL_TOKENS."""
    backend = cuda_backend(0)
    records = []
    for layer in HUGINN:
        for tokens in (17, 32, 48, 64, 96, 128):
            timing = bench_products.capture_int4(backend, layer, tokens, DEVICE).time()
            dequantized = bench_products.capture_dequantized(backend, layer, tokens, DEVICE).time()
            records.append(
                {"layer": layer.name, "tokens": tokens, "int4": timing.median, "other": dequantized.median}
            )
    return {"threshold": records}


def rollout() -> dict[str, Any]:
    """Rollouts of 32 steps: graphs, fusions, overlap, hoisting, and the eager way."""
    backends: dict[str, Backend] = {"plain": cuda_backend(0), "overlap": CudaBackend(0, overlap=True)}
    return {"huginn": bench_rollout.compare_rollouts(backends, DEVICE, size=bench_rollout.LoopSize())}


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    f.__name__: f for f in (exact, small, rollout_exact, products, rollout, models, threshold, sweep)
}


def main() -> int:
    section, folder = sys.argv[1], Path(sys.argv[2])
    started = datetime.datetime.now(datetime.UTC)
    properties = torch.cuda.get_device_properties(0)
    record = {
        "section": section,
        "date": started.date().isoformat(),
        "device": properties.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **SECTIONS[section](),
    }
    record["seconds"] = (datetime.datetime.now(datetime.UTC) - started).total_seconds()
    target = folder / f"{record['date']}-kernels-{section}.json"
    scratch = target.with_suffix(".part")
    scratch.write_text(json.dumps(record, indent=1))
    scratch.replace(target)
    print(f"{section}: {record['seconds']:.0f} s -> {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
