"""Times of the int4 product on a GPU with a cold L2, against cuBLAS and torch's own int4 matmul."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from loopq.errors import ConfigError
from loopq.kernels.bench import (
    CALLS_PER_GRAPH,
    COLD_BYTES,
    TOKENS,
    Captured,
    Int4Layer,
    Timing,
    copy_bandwidth,
    draw,
    paired_bootstrap,
    paired_trials,
)
from loopq.kernels.load import Backend
from loopq.kernels.plan import GemmShape, Plan, make_plan, token_tiles_for
from loopq.kernels.shapes import Projection
from loopq.kernels.w4a16 import Workspace, launch_dequantize, workspace_for

__all__ = ["capture_cublas", "capture_dequantized", "capture_int4", "compare_products", "sweep_cuts"]


def _copies(n_bytes: int) -> int:
    return max(2, -(-COLD_BYTES // n_bytes))


def _rotating(runs: Sequence[Callable[[], None]], rounds: int) -> tuple[Callable[[], None], int]:
    def work() -> None:
        for _ in range(rounds):
            for run in runs:
                run()

    return work, rounds * len(runs)


def capture_int4(
    backend: Backend,
    layer: Projection,
    tokens: int,
    device: torch.device,
    *,
    group_size: int = 128,
    plan: Plan | None = None,
    bulk: bool = False,
) -> Captured:
    """Graph of int4 products over copies of the weight that do not fit the L2 together. Needs a GPU."""
    n_copies = _copies(layer.int4_bytes(group_size))
    copies = [Int4Layer.random(layer, group_size, device, seed, torch.bfloat16) for seed in range(n_copies)]
    x = draw(tokens, layer.in_features, device, 0, torch.bfloat16)
    out = torch.empty(tokens, layer.out_features, dtype=torch.bfloat16, device=device)
    shape = (layer.out_features, 0, layer.in_features, group_size)
    workspace = workspace_for(backend, [shape], tokens, device, bulk)
    if plan is not None:
        floats = plan.slices * ((layer.out_features // 16 + 1) // 2) * 256 * token_tiles_for(tokens)
        workspace = Workspace.allocate(floats, layer.out_features // 16, device)
    runs = [lambda c=c: c.run(backend, x, out, workspace, plan, bulk) for c in copies]
    return Captured.of(*_rotating(runs, -(-CALLS_PER_GRAPH // n_copies)))


def capture_cublas(layer: Projection, tokens: int, device: torch.device) -> Captured:
    """Graph of the same products by cuBLAS in bfloat16. Needs a GPU."""
    n_copies = _copies(2 * layer.n_weights)
    weights = [
        draw(layer.out_features, layer.in_features, device, s, torch.bfloat16) for s in range(n_copies)
    ]
    x = draw(tokens, layer.in_features, device, 0, torch.bfloat16)
    out = torch.empty(tokens, layer.out_features, dtype=torch.bfloat16, device=device)
    runs = [lambda w=w: torch.mm(x, w.t(), out=out) for w in weights]
    return Captured.of(*_rotating(runs, -(-CALLS_PER_GRAPH // n_copies)))


def capture_dequantized(backend: Backend, layer: Projection, tokens: int, device: torch.device) -> Captured:
    """Graph of dequantising the whole weight and multiplying by cuBLAS. Needs a GPU."""
    n_copies = _copies(layer.int4_bytes())
    copies = [Int4Layer.random(layer, 128, device, seed, torch.bfloat16) for seed in range(n_copies)]
    x = draw(tokens, layer.in_features, device, 0, torch.bfloat16)
    weight = torch.empty(layer.out_features, layer.in_features, dtype=torch.bfloat16, device=device)
    out = torch.empty(tokens, layer.out_features, dtype=torch.bfloat16, device=device)

    def run(copy: Int4Layer) -> None:
        launch_dequantize(backend, copy.qweight, copy.scales, weight, 128)
        torch.mm(x, weight.t(), out=out)

    runs = [lambda c=c: run(c) for c in copies]
    return Captured.of(*_rotating(runs, -(-CALLS_PER_GRAPH // n_copies)))


def time_torch_int4(layer: Projection, tokens: int, device: torch.device) -> dict[str, Any]:
    """Time of torch's own int4 matmul at group 128, K padded to a multiple of 128, cold L2. Needs a GPU.

    Returns
    -------
    dict
        ``timing``, or ``unavailable`` with torch's message where it refuses the shape.
    """
    width = -(-layer.in_features // 128) * 128
    n_copies = _copies(width * layer.out_features // 2)
    x = draw(tokens, width, device, 0, torch.bfloat16)
    try:
        packed = [
            torch.ops.aten._convert_weight_to_int4pack(
                torch.randint(0, 256, (layer.out_features, width // 2), dtype=torch.uint8, device=device), 8
            )
            for _ in range(n_copies)
        ]
        scales = torch.rand(width // 128, layer.out_features, 2, device=device).to(torch.bfloat16)
        runs = [lambda w=w: torch.ops.aten._weight_int4pack_mm(x, w, 128, scales) for w in packed]
        timing = Captured.of(*_rotating(runs, -(-CALLS_PER_GRAPH // n_copies))).time()
    except RuntimeError as error:
        return {"unavailable": str(error).splitlines()[0]}
    return {"timing": timing.__dict__, "padded_in_features": width}


def compare_products(
    backend: Backend,
    layers: Sequence[Projection],
    device: torch.device,
    *,
    tokens: Sequence[int] = TOKENS,
    group_size: int = 128,
    bulk: bool = False,
    bandwidth: float | None = None,
) -> dict[str, Any]:
    """Times and bandwidth shares per layer, and a step's calls together, against cuBLAS. Needs a GPU.

    Returns
    -------
    dict
        ``copy_bandwidth`` in bytes per second; ``products``: per layer and tokens the times of the int4 kernel,
        of cuBLAS (paired trials, with the ratio's interval) and of torch's int4, and the int4 bytes per second
        as a share of the copy bandwidth; ``step``: per tokens the sum over a step's calls and its ratio to cuBLAS.
    """
    bandwidth = copy_bandwidth(device) if bandwidth is None else bandwidth
    products, step = [], []
    for m in tokens:
        total_int4 = total_cublas = 0.0
        for layer in layers:
            fast = capture_int4(backend, layer, m, device, group_size=group_size, bulk=bulk)
            slow = capture_cublas(layer, m, device)
            times = paired_trials(slow.graph.replay, fast.graph.replay)
            slow_times = [t / slow.n_calls for t in times[0]]
            fast_times = [t / fast.n_calls for t in times[1]]
            ratio, low, high = paired_bootstrap(slow_times, fast_times)
            ours, cublas = Timing.of(fast_times), Timing.of(slow_times)
            n_bytes = layer.int4_bytes(group_size)
            total_int4 += layer.calls * ours.median
            total_cublas += layer.calls * cublas.median
            products.append(
                {
                    "layer": layer.name,
                    "tokens": m,
                    "int4": ours.__dict__,
                    "cublas_bf16": cublas.__dict__,
                    "ratio": {"ratio": ratio, "low": low, "high": high},
                    "torch_int4": time_torch_int4(layer, m, device),
                    "int4_bytes": n_bytes,
                    "share_of_copy_bandwidth": n_bytes / (ours.median * 1e-6) / bandwidth,
                }
            )
        step.append(
            {"tokens": m, "int4": total_int4, "cublas_bf16": total_cublas, "ratio": total_cublas / total_int4}
        )
    return {"copy_bandwidth": bandwidth, "products": products, "step": step}


def sweep_cuts(
    backend: Backend,
    layers: Sequence[Projection],
    device: torch.device,
    *,
    tokens: Sequence[int] = (1, 16),
    group_size: int = 128,
    slices: Sequence[int] = (1, 2, 3, 4, 6, 12),
    warps: Sequence[int] = (12, 16),
    bulks: Sequence[bool] = (False, True),
    depths: Sequence[int] = (6, 5, 4, 3),
) -> list[dict[str, Any]]:
    """Times of other cuts than the planner's, to tune it. Needs a GPU.

    Returns
    -------
    list of dict
        Layer, tokens, cut (slices, warps, stages, bulk), time, and whether the planner picks it.
    """
    records = []
    for layer in layers:
        for m in tokens:
            shape = GemmShape(layer.out_features, 0, layer.in_features, group_size, token_tiles_for(m))
            for bulk in bulks:
                picked = make_plan(shape, backend.limits, bulk, backend.ring_stages)
                plans = {picked: True}
                for n_slices in slices:
                    plans.update(_cuts(shape, backend, bulk, n_slices, warps, depths, plans))
                for plan, is_picked in plans.items():
                    timing = capture_int4(
                        backend, layer, m, device, group_size=group_size, plan=plan, bulk=bulk
                    ).time()
                    cut = {
                        name: getattr(plan, name) for name in ("blocks", "slices", "warps", "stages", "bulk")
                    }
                    records.append(
                        {
                            "layer": layer.name,
                            "tokens": m,
                            **cut,
                            "picked": is_picked,
                            "int4": timing.__dict__,
                        }
                    )
    return records


def _cuts(
    shape: GemmShape,
    backend: Backend,
    bulk: bool,
    n_slices: int,
    warps: Sequence[int],
    depths: Sequence[int],
    known: dict[Plan, bool],
) -> dict[Plan, bool]:
    """Plans with `n_slices` slices and each number of warps, at the deepest ring that fits."""
    found: dict[Plan, bool] = {}
    try:
        base = make_plan(shape, backend.limits, bulk, backend.ring_stages, n_slices)
    except ConfigError:
        return found
    for count in warps:
        for depth in depths:
            plan = replace(base, warps=count, stages=depth)
            if plan.shared_bytes(shape.token_tiles * 8, shape.token_tiles) <= backend.limits.shared_bytes:
                if plan not in known:
                    found[plan] = False
                break
    return found
