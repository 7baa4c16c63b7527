"""Times of the int4 product on a GPU with a cold L2, against cuBLAS, torch's own int4 matmul and Marlin."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benches.kernels.marlin import time_marlin
from benches.kernels.procedure import (
    TOKENS,
    Int4Layer,
    Procedure,
    Recording,
    Timing,
    copy_bandwidth,
    draw,
    paired_trials,
    ratio_of,
    record,
)
from benches.kernels.shapes import Projection
from benches.kernels.timed import Timed
from loopq.errors import ConfigError
from loopq.runtime.cuda.launch import Product, Workspace, launch_dequantize, workspace_size
from loopq.runtime.cuda.plan import TOKENS_PER_LAUNCH, GemmShape, NarrowPlan, make_plan, token_tiles_for

__all__ = ["compare_products", "find_threshold", "sweep_cuts"]

_TORCH_GROUP = 128


def _operands(layer: Projection, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    x = draw(tokens, layer.in_features, device, 0, torch.bfloat16)
    return x, torch.empty(tokens, layer.out_features, dtype=torch.bfloat16, device=device)


def _int4_copies(backend: Timed, layer: Projection, group_size: int, procedure: Procedure) -> list[Int4Layer]:
    n_copies = procedure.copies(layer.int4_bytes(group_size))
    return [
        Int4Layer.random(layer, group_size, backend.device, seed, torch.bfloat16) for seed in range(n_copies)
    ]


def record_int4(
    backend: Timed,
    copies: Sequence[Int4Layer],
    tokens: int,
    procedure: Procedure,
    *,
    plan: NarrowPlan | None = None,
) -> Recording:
    """Graph of int4 products over copies of the weight that do not fit the L2 together."""
    layer, group_size = copies[0].projection, copies[0].group_size
    x, out = _operands(layer, tokens, backend.device)
    shape = (layer.out_features, 0, layer.in_features, group_size)
    workspace = Workspace.allocate(*workspace_size(backend, shape, tokens), backend.device)
    if plan is not None:
        floats = plan.slices * ((layer.out_features // 16 + 1) // 2) * 256 * token_tiles_for(tokens)
        workspace = Workspace.allocate(floats, layer.out_features // 16, backend.device)
    runs = [partial(copy.run, backend, x, out, workspace, plan) for copy in copies]
    return record(backend, runs, procedure)


def record_pieces(
    backend: Timed, copies: Sequence[Int4Layer], tokens: int, procedure: Procedure
) -> Recording:
    """Graph of int4 products by the kernel of few tokens, which reads the weights once for every 32."""
    layer, group_size = copies[0].projection, copies[0].group_size
    x, out = _operands(layer, tokens, backend.device)
    shape = (layer.out_features, 0, layer.in_features, group_size)
    workspace = Workspace.allocate(*workspace_size(backend, shape, TOKENS_PER_LAUNCH), backend.device)

    def run(copy: Int4Layer) -> None:
        for rows, into in zip(x.split(TOKENS_PER_LAUNCH), out.split(TOKENS_PER_LAUNCH), strict=True):
            copy.run(backend, rows, into, workspace)

    return record(backend, [partial(run, copy) for copy in copies], procedure)


def record_cublas(backend: Timed, layer: Projection, tokens: int, procedure: Procedure) -> Recording:
    """Graph of the same products by cuBLAS in bfloat16."""
    weights = [
        draw(layer.out_features, layer.in_features, backend.device, seed, torch.bfloat16)
        for seed in range(procedure.copies(2 * layer.n_weights))
    ]
    x, out = _operands(layer, tokens, backend.device)
    return record(backend, [partial(torch.mm, x, w.t(), out=out) for w in weights], procedure)


def record_dequantized(
    backend: Timed, copies: Sequence[Int4Layer], tokens: int, procedure: Procedure
) -> Recording:
    """Graph of dequantising the whole weight and multiplying by cuBLAS."""
    layer, group_size = copies[0].projection, copies[0].group_size
    x, out = _operands(layer, tokens, backend.device)
    weight = torch.empty(layer.out_features, layer.in_features, dtype=torch.bfloat16, device=backend.device)

    def run(copy: Int4Layer) -> None:
        operands = x, copy.qweight, copy.scales, None, None, layer.in_features, group_size
        launch_dequantize(backend, Product(*operands), weight)
        torch.mm(x, weight.t(), out=out)

    return record(backend, [partial(run, copy) for copy in copies], procedure)


def time_torch_int4(backend: Timed, layer: Projection, tokens: int, procedure: Procedure) -> dict[str, Any]:
    """Time of torch's own int4 matmul at group 128, K padded to a multiple of 128, cold L2.

    Returns
    -------
    dict
        ``timing``, or ``unavailable`` with torch's message where it refuses the shape.
    """
    device = backend.device
    width = -(-layer.in_features // _TORCH_GROUP) * _TORCH_GROUP
    n_copies = procedure.copies(width * layer.out_features // 2)
    x = draw(tokens, width, device, 0, torch.bfloat16)
    try:
        packed = [
            torch.ops.aten._convert_weight_to_int4pack(
                torch.randint(0, 256, (layer.out_features, width // 2), dtype=torch.uint8, device=device), 8
            )
            for _ in range(n_copies)
        ]
        scales = torch.rand(width // _TORCH_GROUP, layer.out_features, 2, device=device).to(torch.bfloat16)
        multiply = torch.ops.aten._weight_int4pack_mm
        runs = [partial(multiply, x, w, _TORCH_GROUP, scales) for w in packed]
        timing = record(backend, runs, procedure).time(backend, procedure)
    except (RuntimeError, NotImplementedError) as error:
        return {"unavailable": str(error).splitlines()[0]}
    return {"timing": timing.__dict__, "padded_in_features": width}


def compare_products(
    backend: Timed,
    layers: Sequence[Projection],
    *,
    tokens: Sequence[int] = TOKENS,
    group_size: int = 128,
    bandwidth: float | None = None,
    procedure: Procedure | None = None,
) -> dict[str, Any]:
    """Times and bandwidth shares per layer, and a step's calls together, against cuBLAS.

    Parameters
    ----------
    backend : Timed
    layers : sequence of Projection
    tokens : sequence of int
    group_size : int
    bandwidth : float or None
        Bytes per second of a copy; measured where None.
    procedure : Procedure or None
        That of Li, App. D by default.

    Returns
    -------
    dict
        ``copy_bandwidth`` in bytes per second; ``products``: per layer and tokens the times of the int4
        kernel, of cuBLAS (paired trials, with the ratio's interval), of torch's int4 and of Marlin, and the int4
        bytes per second as a share of the copy bandwidth; ``step``: per tokens the sum over a step's calls and its
        ratio to cuBLAS.
    """
    procedure = procedure or Procedure()
    bandwidth = copy_bandwidth(backend, procedure) if bandwidth is None else bandwidth
    products, step = [], []
    for m in tokens:
        compared = [_compare_layer(backend, layer, m, group_size, bandwidth, procedure) for layer in layers]
        totals = {
            kind: sum(layer.calls * row[kind]["median"] for layer, row in zip(layers, compared, strict=True))
            for kind in ("int4", "cublas_bf16")
        }
        products += compared
        step.append({"tokens": m, **totals, "ratio": totals["cublas_bf16"] / totals["int4"]})
    return {"copy_bandwidth": bandwidth, "products": products, "step": step}


def _compare_layer(
    backend: Timed,
    layer: Projection,
    tokens: int,
    group_size: int,
    bandwidth: float,
    procedure: Procedure,
) -> dict[str, Any]:
    copies = _int4_copies(backend, layer, group_size, procedure)
    fast = record_int4(backend, copies, tokens, procedure)
    slow = record_cublas(backend, layer, tokens, procedure)
    slow_times, fast_times = paired_trials(backend, slow.captured.replay, fast.captured.replay, procedure)
    cublas, ours = slow.per_call(slow_times), fast.per_call(fast_times)
    timing = Timing.of(ours)
    n_bytes = layer.int4_bytes(group_size)
    return {
        "layer": layer.name,
        "tokens": tokens,
        "int4": timing.__dict__,
        "cublas_bf16": Timing.of(cublas).__dict__,
        "ratio": ratio_of(cublas, ours),
        "torch_int4": time_torch_int4(backend, layer, tokens, procedure),
        "marlin": time_marlin(backend, layer, tokens, procedure),
        "int4_bytes": n_bytes,
        "share_of_copy_bandwidth": n_bytes / (timing.median * 1e-6) / bandwidth,
    }


def find_threshold(
    backend: Timed,
    layers: Sequence[Projection],
    *,
    tokens: Sequence[int] = (17, 32, 48, 64, 96, 128, 192, 256, 384, 512),
    group_size: int = 128,
    procedure: Procedure | None = None,
) -> list[dict[str, Any]]:
    """Kernels against dequantise-and-multiply, to place `TOKENS_PER_LAUNCH` and `INT4_KERNEL_TOKENS`.

    Returns
    -------
    list of dict
        Layer, tokens, and the median microseconds ``int4``, ``pieces`` (the kernel of few tokens, 32 at a time) and
        ``dequantized``.
    """
    procedure = procedure or Procedure()
    records = []
    for layer in layers:
        copies = _int4_copies(backend, layer, group_size, procedure)
        for m in tokens:
            kernel = record_int4(backend, copies, m, procedure).time(backend, procedure)
            pieces = record_pieces(backend, copies, m, procedure).time(backend, procedure)
            other = record_dequantized(backend, copies, m, procedure).time(backend, procedure)
            medians = {"int4": kernel.median, "pieces": pieces.median, "dequantized": other.median}
            records.append({"layer": layer.name, "tokens": m, **medians})
    return records


def sweep_cuts(
    backend: Timed,
    layers: Sequence[Projection],
    *,
    tokens: Sequence[int] = (1, 16),
    group_size: int = 128,
    slices: Sequence[int] = (1, 2, 3, 4, 5, 6),
    warps: Sequence[int] = (8, 12, 16),
    depths: Sequence[int] = (6, 5, 4, 3),
    seconds: float = float("inf"),
    procedure: Procedure | None = None,
) -> dict[str, Any]:
    """Times of other cuts than the planner's, to tune it.

    Parameters
    ----------
    backend, layers, tokens, group_size
    slices, warps, depths
        What is tried; of the depths the deepest that fits.
    seconds : float
        No new cut is begun after this time.
    procedure : Procedure or None

    Returns
    -------
    dict
        ``cuts``: layer, tokens, cut (blocks, slices, warps, stages), time, and whether the planner picks it;
        ``complete``: whether all were tried.
    """
    procedure = procedure or Procedure()
    started = time.monotonic()
    records: list[dict[str, Any]] = []
    for layer in layers:
        copies = _int4_copies(backend, layer, group_size, procedure)
        for m in tokens:
            for plan, is_picked in _plans(backend, layer, m, group_size, slices, warps, depths).items():
                if time.monotonic() - started > seconds:
                    return {"cuts": records, "complete": False}
                recording = record_int4(backend, copies, m, procedure, plan=plan)
                cut = {name: getattr(plan, name) for name in ("blocks", "slices", "warps", "stages")}
                timing = recording.time(backend, procedure).__dict__
                records.append({"layer": layer.name, "tokens": m, **cut, "picked": is_picked, "int4": timing})
    return {"cuts": records, "complete": True}


def _plans(
    backend: Timed,
    layer: Projection,
    tokens: int,
    group_size: int,
    slices: Sequence[int],
    warps: Sequence[int],
    depths: Sequence[int],
) -> dict[NarrowPlan, bool]:
    """Plans to try, and whether the planner picks them."""
    shape = GemmShape(layer.out_features, 0, layer.in_features, group_size, token_tiles_for(tokens))
    plans = {make_plan(shape, backend.limits, backend.ring_stages): True}
    for n_slices in slices:
        try:
            base = make_plan(shape, backend.limits, backend.ring_stages, n_slices)
        except ConfigError:
            continue
        for count in warps:
            tried = (replace(base, warps=count, stages=depth) for depth in depths)
            fits = (
                plan
                for plan in tried
                if plan.shared_bytes(shape.token_tiles * 8, shape.token_tiles) <= backend.limits.shared_bytes
            )
            for plan in fits:
                plans.setdefault(plan, False)
                break
    return plans
