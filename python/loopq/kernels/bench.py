"""Measurements of the int4 product on a GPU: exactness, time with a cold L2, share of the copy bandwidth.

Every function returns plain numbers for a JSON record and prints nothing. What runs on a GPU says so; the
statistics
and the comparison with float64 run anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loopq.errors import ConfigError
from loopq.kernels.layout import TILE_K, WORDS_PER_TILE
from loopq.kernels.load import Backend
from loopq.kernels.plan import GemmShape, Plan, make_plan, token_tiles_for
from loopq.kernels.shapes import Projection
from loopq.kernels.w4a16 import (
    Workspace,
    dequantize_packed,
    launch_dequantize,
    launch_gemm,
    spread_scales,
    workspace_for,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "COLD_BYTES",
    "TOKENS",
    "WARM_UPS",
    "Int4Layer",
    "Timing",
    "compare_products",
    "copy_bandwidth",
    "paired_bootstrap",
    "paired_trials",
    "sweep_cuts",
    "time_graph",
    "verify_products",
]

TOKENS = (1, 7, 16)
"""Token counts of the paper's comparisons."""
WARM_UPS = 10
TRIALS = 50
"""The paper's protocol: 10 warm-ups per arm, 50 paired trials in alternating order, medians."""
COLD_BYTES = 200 * 1024 * 1024
"""Weights rotated through between two uses of the same copy: more than three times an H200's L2."""


CALLS_PER_GRAPH = 64
"""So that the launch of the graph itself does not count."""


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: median, and the quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        low, median, high = np.percentile(np.asarray(samples), (25, 50, 75))
        return cls(float(median), float(low), float(high))


@dataclass(frozen=True)
class Int4Layer:
    """Random codes and scales of a layer, made on the device: any 32 bits are eight valid codes."""

    projection: Projection
    group_size: int
    qweight: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def random(
        cls, projection: Projection, group_size: int, device: torch.device, seed: int, like: torch.dtype
    ) -> Int4Layer:
        generator = torch.Generator(device).manual_seed(seed)
        tiles = -(-projection.in_features // TILE_K)
        words = torch.randint(
            -(2**31),
            2**31,
            (projection.out_features // 16, tiles * WORDS_PER_TILE),
            generator=generator,
            device=device,
            dtype=torch.int64,
        ).to(torch.int32)
        groups = 1 if group_size == -1 else -(-projection.in_features // group_size)
        scales = torch.rand(groups, projection.out_features, generator=generator, device=device) + 0.5
        scales = scales / (6.0 * projection.in_features**0.5)
        return cls(projection, group_size, words, scales.to(like))

    def run(
        self,
        backend: Backend,
        x: torch.Tensor,
        out: torch.Tensor,
        workspace: Workspace,
        plan: Plan | None = None,
        bulk: bool = False,
    ) -> None:
        launch_gemm(
            backend,
            x,
            self.qweight,
            self.scales,
            out,
            in_features=self.projection.in_features,
            group_size=self.group_size,
            workspace=workspace,
            plan=plan,
            bulk=bulk,
        )

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """The product of the stored integers and scales in float64."""
        in_features = self.projection.in_features
        ones = torch.ones_like(self.scales[:1], dtype=torch.float32)
        codes = dequantize_packed(self.qweight, ones, in_features, -1).double()
        weight = codes * spread_scales(self.scales, in_features, self.group_size).double()
        return x.double() @ weight.t()


def _draw(rows: int, columns: int, device: torch.device, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, device=device).to(dtype)


def relative_l2(result: torch.Tensor, expected: torch.Tensor) -> float:
    """``|result - expected| / |expected|`` in float64."""
    return float((result.double() - expected.double()).norm() / expected.double().norm())


def verify_products(
    backend: Backend,
    layers: Sequence[Projection],
    device: torch.device,
    *,
    tokens: Sequence[int] = TOKENS,
    group_size: int = 128,
    bulk: bool = False,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Each call of a step at each number of tokens against float64 on the stored codes and scales.

    Parameters
    ----------
    backend : Backend
    layers : sequence of Projection
        `HUGINN` gives 17 calls, hence the paper's 51 comparisons.
    device : torch.device
    tokens : sequence of int
    group_size : int
    bulk : bool
    seed : int

    Returns
    -------
    list of dict
        Per comparison: ``error_float32`` (float32 output against float64), ``error_rounded`` (16-bit
        output against
        the correctly rounded product), ``error_bfloat16`` (16-bit output against float64, as the paper
        measures),
        ``repeatable`` (two runs, same bits), ``same_in_batch`` (first token alone, same bits).
    """
    records = []
    largest = max(tokens)
    for layer in layers:
        for call in range(layer.calls):
            weights = Int4Layer.random(layer, group_size, device, seed + 1000 * call, torch.bfloat16)
            shape = (layer.out_features, 0, layer.in_features, group_size)
            workspace = workspace_for(backend, [shape], largest, device, bulk)
            x = _draw(largest, layer.in_features, device, seed + call, torch.bfloat16)
            exact = weights.exact(x)
            for m in tokens:
                outs = []
                for rows, dtype in (
                    (m, torch.float32),
                    (m, torch.bfloat16),
                    (m, torch.float32),
                    (1, torch.float32),
                ):
                    out = torch.full((rows, layer.out_features), torch.nan, dtype=dtype, device=device)
                    weights.run(backend, x[:rows], out, workspace, bulk=bulk)
                    outs.append(out)
                records.append(
                    {
                        "layer": layer.name,
                        "call": call,
                        "tokens": m,
                        "error_float32": relative_l2(outs[0], exact[:m]),
                        "error_rounded": relative_l2(outs[1], exact[:m].to(torch.bfloat16)),
                        "error_bfloat16": relative_l2(outs[1], exact[:m]),
                        "repeatable": torch.equal(outs[0], outs[2]),
                        "same_in_batch": m > 16 or torch.equal(outs[0][:1], outs[3]),
                    }
                )
    return records


def copy_bandwidth(device: torch.device, n_bytes: int = 4 * 1024**3, repeats: int = 20) -> float:
    """Bytes per second, read plus written, of a device-to-device copy. Needs a GPU."""
    source = torch.empty(n_bytes, dtype=torch.uint8, device=device).random_(0, 256)
    target = torch.empty_like(source)
    times = _event_times(lambda: target.copy_(source), repeats)
    return 2 * n_bytes / (float(np.median(times)) * 1e-6)


def _event_times(work: Callable[[], object], repeats: int) -> list[float]:
    """Microseconds of each of `repeats` runs, by device events, after WARM_UPS runs."""
    for _ in range(WARM_UPS):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000.0)
    return times


def capture(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of `work`, which runs once before so that everything is loaded. Needs a GPU."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def time_graph(work: Callable[[], None], n_calls: int, repeats: int = 30) -> Timing:
    """Microseconds per call of work that makes `n_calls` calls, replayed as a graph. Needs a GPU."""
    graph = capture(work)
    return Timing.of([t / n_calls for t in _event_times(graph.replay, repeats)])


def paired_trials(
    first: Callable[[], object], second: Callable[[], object], trials: int = TRIALS
) -> tuple[list[float], list[float]]:
    """Microseconds of both arms: warm-ups of each, then paired trials in alternating order. Needs a GPU."""
    for _ in range(WARM_UPS):
        first()
        second()
    times: tuple[list[float], list[float]] = ([], [])
    for trial in range(trials):
        order = (0, 1) if trial % 2 == 0 else (1, 0)
        for arm in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            (first, second)[arm]()
            end.record()
            end.synchronize()
            times[arm].append(start.elapsed_time(end) * 1000.0)
    return times


def paired_bootstrap(
    first: Sequence[float] | NDArray[np.float64],
    second: Sequence[float] | NDArray[np.float64],
    *,
    n_resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Ratio of median times ``first / second`` with a percentile interval over resampled pairs.

    Parameters
    ----------
    first, second : sequence of float
        Times of paired trials.
    n_resamples : int
    level : float
    seed : int

    Returns
    -------
    ratio, low, high : float

    Raises
    ------
    ConfigError
        If the trials are not paired, or there are none.

    Examples
    --------
    >>> paired_bootstrap([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    (2.0, 2.0, 2.0)
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.shape != b.shape or a.ndim != 1 or a.size == 0:
        raise ConfigError(f"paired trials are needed; got {a.shape} and {b.shape}")
    picks = np.random.default_rng(seed).integers(0, a.size, (n_resamples, a.size))
    ratios = np.median(a[picks], axis=1) / np.median(b[picks], axis=1)
    low, high = np.quantile(ratios, ((1 - level) / 2, (1 + level) / 2))
    return float(np.median(a) / np.median(b)), float(low), float(high)


def _copies(n_bytes: int) -> int:
    return max(2, -(-COLD_BYTES // n_bytes))


def _rotating(runs: Sequence[Callable[[], None]], rounds: int) -> tuple[Callable[[], None], int]:
    def work() -> None:
        for _ in range(rounds):
            for run in runs:
                run()

    return work, rounds * len(runs)


def time_int4(
    backend: Backend,
    layer: Projection,
    tokens: int,
    device: torch.device,
    *,
    group_size: int = 128,
    plan: Plan | None = None,
    bulk: bool = False,
) -> Timing:
    """Time of one product with a cold L2. Needs a GPU."""
    n_copies = _copies(layer.int4_bytes(group_size))
    copies = [Int4Layer.random(layer, group_size, device, seed, torch.bfloat16) for seed in range(n_copies)]
    x = _draw(tokens, layer.in_features, device, 0, torch.bfloat16)
    out = torch.empty(tokens, layer.out_features, dtype=torch.bfloat16, device=device)
    shape = (layer.out_features, 0, layer.in_features, group_size)
    workspace = workspace_for(backend, [shape], tokens, device, bulk)
    if plan is not None:
        floats = plan.slices * ((layer.out_features // 16 + 1) // 2) * 256 * token_tiles_for(tokens)
        workspace = Workspace.allocate(floats, layer.out_features // 16, device)
    runs = [lambda c=c: c.run(backend, x, out, workspace, plan, bulk) for c in copies]
    return time_graph(*_rotating(runs, -(-CALLS_PER_GRAPH // n_copies)))


def time_cublas(layer: Projection, tokens: int, device: torch.device) -> Timing:
    """Time of the same product by cuBLAS in bfloat16, cold L2. Needs a GPU."""
    n_copies = _copies(2 * layer.n_weights)
    weights = [
        _draw(layer.out_features, layer.in_features, device, s, torch.bfloat16) for s in range(n_copies)
    ]
    x = _draw(tokens, layer.in_features, device, 0, torch.bfloat16)
    out = torch.empty(tokens, layer.out_features, dtype=torch.bfloat16, device=device)
    runs = [lambda w=w: torch.mm(x, w.t(), out=out) for w in weights]
    return time_graph(*_rotating(runs, -(-CALLS_PER_GRAPH // n_copies)))


def time_dequantized(backend: Backend, layer: Projection, tokens: int, device: torch.device) -> Timing:
    """Time of dequantising the whole weight and multiplying by cuBLAS, cold L2. Needs a GPU."""
    n_copies = _copies(layer.int4_bytes())
    copies = [Int4Layer.random(layer, 128, device, seed, torch.bfloat16) for seed in range(n_copies)]
    x = _draw(tokens, layer.in_features, device, 0, torch.bfloat16)
    weight = torch.empty(layer.out_features, layer.in_features, dtype=torch.bfloat16, device=device)
    out = torch.empty(tokens, layer.out_features, dtype=torch.bfloat16, device=device)

    def run(copy: Int4Layer) -> None:
        launch_dequantize(backend, copy.qweight, copy.scales, weight, 128)
        torch.mm(x, weight.t(), out=out)

    runs = [lambda c=c: run(c) for c in copies]
    return time_graph(*_rotating(runs, -(-CALLS_PER_GRAPH // n_copies)))


def time_torch_int4(layer: Projection, tokens: int, device: torch.device) -> dict[str, Any]:
    """Time of torch's own int4 matmul at group 128, K padded to a multiple of 128, cold L2. Needs a GPU.

    Returns
    -------
    dict
        ``timing``, or ``unavailable`` with torch's message where it refuses the shape.
    """
    width = -(-layer.in_features // 128) * 128
    n_copies = _copies(width * layer.out_features // 2)
    x = _draw(tokens, width, device, 0, torch.bfloat16)
    try:
        packed = [
            torch.ops.aten._convert_weight_to_int4pack(
                torch.randint(0, 256, (layer.out_features, width // 2), dtype=torch.uint8, device=device), 8
            )
            for _ in range(n_copies)
        ]
        scales = torch.rand(width // 128, layer.out_features, 2, device=device).to(torch.bfloat16)
        runs = [lambda w=w: torch.ops.aten._weight_int4pack_mm(x, w, 128, scales) for w in packed]
        timing = time_graph(*_rotating(runs, -(-CALLS_PER_GRAPH // n_copies)))
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
    """Time and bandwidth share per layer, and the calls of a step together against cuBLAS. Needs a GPU.

    Returns
    -------
    dict
        ``copy_bandwidth`` in bytes per second; ``products``: per layer and tokens the times of the int4
        kernel,
        cuBLAS and torch's int4, and the int4 bytes per second as a share of the copy bandwidth; ``step``: per
        tokens the sum over a step's calls and the ratio to cuBLAS.
    """
    bandwidth = copy_bandwidth(device) if bandwidth is None else bandwidth
    products, step = [], []
    for m in tokens:
        total_int4 = total_cublas = 0.0
        for layer in layers:
            ours = time_int4(backend, layer, m, device, group_size=group_size, bulk=bulk)
            cublas = time_cublas(layer, m, device)
            n_bytes = layer.int4_bytes(group_size)
            total_int4 += layer.calls * ours.median
            total_cublas += layer.calls * cublas.median
            products.append(
                {
                    "layer": layer.name,
                    "tokens": m,
                    "int4": ours.__dict__,
                    "cublas_bf16": cublas.__dict__,
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
                picked = make_plan(shape, backend.limits, bulk)
                plans = {picked: True}
                for n_slices in slices:
                    plans.update(_cuts(shape, backend, bulk, n_slices, warps, plans))
                for plan, is_picked in plans.items():
                    timing = time_int4(backend, layer, m, device, group_size=group_size, plan=plan, bulk=bulk)
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
    known: dict[Plan, bool],
) -> dict[Plan, bool]:
    """Plans with `n_slices` slices and each number of warps, at the deepest ring that fits."""
    found: dict[Plan, bool] = {}
    try:
        base = make_plan(shape, backend.limits, bulk, slices=n_slices)
    except ConfigError:
        return found
    for count in warps:
        for depth in (6, 5, 4, 3):
            plan = replace(base, warps=count, stages=depth)
            if plan.shared_bytes(shape.token_tiles * 8, shape.token_tiles) <= backend.limits.shared_bytes:
                if plan not in known:
                    found[plan] = False
                break
    return found
