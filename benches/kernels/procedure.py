"""Code shared by all measurements of the kernels: the procedure, timing, and exactness against float64.

Every function returns plain numbers for a JSON record and prints nothing. The backend brings the clock and the
graphs, so all of it also runs, untimed, on a stand-in for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from benches.kernels.shapes import BENCH_TOKENS, BENCH_TRIALS, BENCH_WARM_UPS, Projection
from benches.kernels.timed import Captured, Timed
from loopq.errors import ConfigError
from loopq.evaluation.stats import Interval, bootstrap, sample
from loopq.runtime.cuda.launch import Product, Workspace, launch_gemm, workspace_size
from loopq.runtime.cuda.layout import TILE_K, WORDS_PER_TILE
from loopq.runtime.cuda.plan import NarrowPlan
from loopq.runtime.cuda.w4a16 import dequantize_packed, spread_scales

if TYPE_CHECKING:
    pass

__all__ = [
    "TOKENS",
    "Int4Layer",
    "Procedure",
    "Recording",
    "Timing",
    "copy_bandwidth",
    "draw",
    "paired_trials",
    "ratio_of",
    "record",
    "verify_products",
]

TOKENS = BENCH_TOKENS
_N_RESAMPLES = 10_000


@dataclass(frozen=True)
class Procedure:
    """How times are taken; the defaults are the protocol of Li, App. D, on a chip of an H200's size.

    Attributes
    ----------
    warm_ups : int
        Runs of every variant before anything is timed.
    trials : int
        Paired trials in alternating order; medians are reported.
    cold_bytes : int
        Weights rotated through between two uses of the same copy: more than three times an H200's L2 (60 MB).
    calls_per_graph : int
        At least so many products in one graph, so that the launch of the graph itself does not count.
    copy_bytes : int
        Size of the copy that measures the bandwidth.
    """

    warm_ups: int = BENCH_WARM_UPS
    trials: int = BENCH_TRIALS
    cold_bytes: int = 200 * 1024**2
    calls_per_graph: int = 64
    copy_bytes: int = 4 * 1024**3

    def __post_init__(self) -> None:
        for name, least in (("warm_ups", 0), ("trials", 1), ("cold_bytes", 0), ("calls_per_graph", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}; got {getattr(self, name)}")

    def copies(self, n_bytes: int) -> int:
        """Copies of a weight of `n_bytes` that do not fit the cache together."""
        return max(2, -(-self.cold_bytes // n_bytes))


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
        backend: Timed,
        x: torch.Tensor,
        out: torch.Tensor,
        workspace: Workspace,
        plan: NarrowPlan | None = None,
    ) -> None:
        in_features = self.projection.in_features
        product = Product(x, self.qweight, self.scales, None, None, in_features, self.group_size)
        launch_gemm(backend, product, out, workspace, plan=plan)

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """The product of the stored integers and scales in float64."""
        in_features = self.projection.in_features
        ones = torch.ones_like(self.scales[:1], dtype=torch.float32)
        codes = dequantize_packed(Product(x, self.qweight, ones, None, None, in_features, -1)).double()
        weight = codes * spread_scales(self.scales, in_features, self.group_size).double()
        return x.double() @ weight.t()


def draw(rows: int, columns: int, device: torch.device, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, device=device).to(dtype)


def relative_l2(result: torch.Tensor, expected: torch.Tensor) -> float:
    """``|result - expected| / |expected|`` in float64."""
    return float((result.double() - expected.double()).norm() / expected.double().norm())


def verify_products(
    backend: Timed,
    layers: Sequence[Projection],
    *,
    tokens: Sequence[int] = TOKENS,
    group_size: int = 128,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Each call of a step at each number of tokens against float64 on the stored codes and scales.

    Parameters
    ----------
    backend : Timed
    layers : sequence of Projection
        `HUGINN` gives 17 calls, at three token counts the 51 comparisons of Li, App. D.
    tokens : sequence of int
    group_size : int
    seed : int

    Returns
    -------
    list of dict
        Per comparison: ``error_float32`` (float32 output against float64), ``error_rounded`` (16-bit output
        against the correctly rounded product), ``error_bfloat16`` (16-bit output against float64, as in Li,
        App. D), ``repeatable`` (two runs, same bits), ``same_in_batch`` (first token alone, same bits).
    """
    records = []
    device, largest = backend.device, max(tokens)
    for layer in layers:
        for call in range(layer.calls):
            weights = Int4Layer.random(layer, group_size, device, seed + 1000 * call, torch.bfloat16)
            shape = (layer.out_features, 0, layer.in_features, group_size)
            workspace = Workspace.allocate(*workspace_size(backend, shape, largest), device)
            x = draw(largest, layer.in_features, device, seed + call, torch.bfloat16)
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
                    weights.run(backend, x[:rows], out, workspace)
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


def copy_bandwidth(backend: Timed, procedure: Procedure) -> float:
    """Bytes per second, read plus written, of a copy on the device."""
    source = torch.empty(procedure.copy_bytes, dtype=torch.uint8, device=backend.device).random_(0, 256)
    target = torch.empty_like(source)

    def work() -> None:
        target.copy_(source)

    for _ in range(procedure.warm_ups):
        work()
    times = [backend.microseconds(work) for _ in range(procedure.trials)]
    return 2 * procedure.copy_bytes / (float(np.median(times)) * 1e-6)


@dataclass(frozen=True)
class Recording:
    """A graph of `n_calls` calls."""

    captured: Captured
    n_calls: int

    def per_call(self, times: Sequence[float]) -> list[float]:
        return [t / self.n_calls for t in times]

    def time(self, backend: Timed, procedure: Procedure) -> Timing:
        """Microseconds per call."""
        for _ in range(procedure.warm_ups):
            self.captured.replay()
        times = [backend.microseconds(self.captured.replay) for _ in range(procedure.trials)]
        return Timing.of(self.per_call(times))


def record(backend: Timed, runs: Sequence[Callable[[], object]], procedure: Procedure) -> Recording:
    """Graph of all `runs` in turn, as often as makes `calls_per_graph` calls."""
    rounds = -(-procedure.calls_per_graph // len(runs))

    def once() -> None:
        for run in runs:
            run()

    def work() -> None:
        for _ in range(rounds):
            once()

    return Recording(backend.capture(work, once), rounds * len(runs))


def paired_trials(
    backend: Timed, first: Callable[[], object], second: Callable[[], object], procedure: Procedure
) -> tuple[list[float], list[float]]:
    """Microseconds of both variants: warm-ups of each, then paired trials in alternating order."""
    for _ in range(procedure.warm_ups):
        first()
        second()
    times: tuple[list[float], list[float]] = ([], [])
    for trial in range(procedure.trials):
        order = (0, 1) if trial % 2 == 0 else (1, 0)
        for which in order:
            times[which].append(backend.microseconds((first, second)[which]))
    return times


def median_ratio(
    numerator: ArrayLike,
    denominator: ArrayLike,
    n_resamples: int = _N_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Paired bootstrap of median(numerator) / median(denominator): a latency ratio over trials (Li, Sec. 6.2)."""
    return bootstrap(
        [sample(numerator, "numerator", positive=True), sample(denominator, "denominator", positive=True)],
        lambda a, b, axis: np.median(a, axis) / np.median(b, axis),
        n_resamples,
        seed,
        "paired bootstrap over trials of a ratio of medians",
    )


def ratio_of(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Ratio of median times ``first / second`` over paired trials, with its 95 % interval, for a record."""
    interval = median_ratio(first, second)
    return {"ratio": interval.estimate, "low": interval.low, "high": interval.high}
