"""The parts of the benchmarks that need no GPU: statistics, shapes, and both emulated verifications."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benches.kernels import marlin
from benches.kernels import procedure as bench
from benches.kernels import products as bench_products
from benches.kernels import solver as bench_solver
from benches.kernels.shapes import HUGINN, MODELS, Projection, weights_per_step
from loopq.errors import ConfigError
from loopq.quantizers.twin import beam
from tests.support.cuda.backend import EmulatedBackend

CPU = torch.device("cpu")


def test_huginn_is_as_large_as_published() -> None:
    assert weights_per_step(HUGINN) == 1_637_222_400
    assert sum(layer.calls for layer in HUGINN) == 17
    step = sum(layer.calls * layer.int4_bytes() for layer in HUGINN)
    # 0.8445 GB without any padding; tiles of 64 rows fill up 32 rows of K = 5280.
    assert 0.8445e9 <= step <= 0.8445e9 * 1.006
    for layers in MODELS.values():
        assert all(layer.in_features % 32 == 0 and layer.out_features % 16 == 0 for layer in layers)


@pytest.mark.kernels
def test_verification_of_the_solver_runs_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels(device: torch.device) -> EmulatedBackend | None:
        return next(ours)

    backend = EmulatedBackend()
    ours = itertools.cycle((None, backend))
    monkeypatch.setattr(beam, "kernels", kernels)
    assert bench_solver.verify_solver(CPU, (2,))["beam_2"] > 0.8
    assert backend.launches["loopq_beam"] == 2 * 3


def test_timing_takes_quartiles() -> None:
    assert bench.Timing.of([1.0, 2.0, 3.0, 4.0, 100.0]) == bench.Timing(3.0, 2.0, 4.0)


@pytest.mark.kernels
def test_verification_of_products() -> None:
    layers = [Projection("a", 1312, 48, 2), Projection("b", 96, 80, 1)]
    records = bench.verify_products(EmulatedBackend(), layers, tokens=(1, 7, 40))
    assert len(records) == 9
    for record in records:
        assert record["error_float32"] < 1e-6
        assert record["error_rounded"] < 2e-4
        assert 1e-3 < record["error_bfloat16"] < 2.2e-3, "one rounding to bfloat16, no more and no less"
        assert record["repeatable"]
        assert record["same_in_batch"]


@pytest.mark.kernels
def test_verification_notices_a_wrong_product() -> None:
    class Wrong(EmulatedBackend):
        def launch(self, kernel, grid, threads, shared_bytes, args):  # type: ignore[no-untyped-def]
            args = list(args)
            args[-6] = np.int32(1)  # one scale row instead of all of them
            super().launch(kernel, grid, threads, shared_bytes, args)

    (record,) = bench.verify_products(Wrong(), [Projection("a", 416, 48, 1)], tokens=(1,))
    assert record["error_float32"] > 1e-2


@pytest.mark.kernels
class FixedClock(EmulatedBackend):
    """Runs nothing when timed: the variants take 3 and 1 microseconds in the order in which they are first timed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []
        self.order: list[int] = []

    def microseconds(self, work: Callable[[], object]) -> float:
        if work not in self.seen:
            self.seen.append(work)
        self.order.append(self.seen.index(work))
        return 3.0 if self.order[-1] % 2 == 0 else 1.0


QUICK = bench.Procedure(warm_ups=0, trials=4, cold_bytes=1, calls_per_graph=2, copy_bytes=64)


def test_the_papers_procedure_is_the_default() -> None:
    assert bench.Procedure() == bench.Procedure(warm_ups=10, trials=50)
    assert bench.Procedure().copies(HUGINN[0].int4_bytes()) * HUGINN[0].int4_bytes() >= 200 * 1024**2
    with pytest.raises(ConfigError, match="trials must be at least 1; got 0"):
        bench.Procedure(trials=0)


def test_paired_trials_alternate_and_warm_up() -> None:
    backend = FixedClock()
    calls: list[str] = []
    first, second = lambda: calls.append("first"), lambda: calls.append("second")
    procedure = bench.Procedure(warm_ups=2, trials=4)
    assert bench.paired_trials(backend, first, second, procedure) == ([3.0] * 4, [1.0] * 4)
    assert calls == ["first", "second"] * 2
    assert backend.order == [0, 1, 1, 0, 0, 1, 1, 0]


def test_copy_counts_what_is_read_and_written() -> None:
    assert bench.copy_bandwidth(FixedClock(), QUICK) == pytest.approx(2 * 64 / 3e-6)


def test_a_recording_repeats_its_runs() -> None:
    calls: list[int] = []
    runs = [lambda i=i: calls.append(i) for i in range(3)]
    recording = bench.record(FixedClock(), runs, bench.Procedure(calls_per_graph=7))
    assert calls == [0, 1, 2], "one round before, so that everything is loaded"
    recording.captured.replay()
    assert calls[3:] == [0, 1, 2] * 3
    assert recording.n_calls == 9
    assert recording.per_call([18.0]) == [2.0]


def _install_marlin(monkeypatch: pytest.MonkeyPatch, factor: float) -> list[tuple[int, int]]:
    """Put modules with GPTQModel's functions among those that are imported; their product is `factor` times right."""

    def product(
        x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, **named: Any
    ) -> torch.Tensor:
        shapes.append((named["input_size_per_partition"], named["output_size_per_partition"]))
        return factor * (x.float() @ marlin.dequantized(weight, weight_scale)).to(x.dtype)

    shapes: list[tuple[int, int]] = []
    utils, types = (ModuleType(name) for name in marlin.SOURCES["gptqmodel"][1:])
    functions: dict[str, Any] = {
        "marlin_make_empty_g_idx": lambda device: torch.empty(0, dtype=torch.int, device=device),
        "marlin_make_workspace_new": lambda device: torch.zeros(128, dtype=torch.int, device=device),
        "marlin_permute_scales": lambda scales, width, height, group: scales,
        "gptq_marlin_repack": lambda words, order, width, height, bits: words,
        "apply_gptq_marlin_linear": product,
    }
    vars(utils).update(functions)
    vars(types)["scalar_types"] = SimpleNamespace(uint4b8="uint4b8")
    for module in (utils, types):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return shapes


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_marlin_is_timed_if_its_product_is_right(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    shapes = _install_marlin(monkeypatch, factor)
    found = marlin.time_marlin(FixedClock(), Projection("a", 160, 48, 1), 2, QUICK)
    assert set(shapes) == {(256, 256)}
    if factor == 1.0:
        assert (found["source"], found["padded"]) == ("gptqmodel", (256, 256))
        assert found["timing"]["median"] == 1.5
    else:
        assert found == {"source": "gptqmodel", "unavailable": "its product differs by 1.0e-01"}


def test_marlin_that_is_not_installed_is_named() -> None:
    found = marlin.time_marlin(FixedClock(), Projection("a", 160, 48, 1), 2, QUICK)
    assert "vllm: ModuleNotFoundError" in found["unavailable"]
    assert "gptqmodel: ModuleNotFoundError" in found["unavailable"]


@pytest.mark.kernels
def test_comparison_of_products_adds_up() -> None:
    layers = [Projection("a", 1312, 48, 2), Projection("b", 96, 80, 1)]
    compared = bench_products.compare_products(
        FixedClock(), layers, tokens=(1, 7), bandwidth=1e9, procedure=QUICK
    )
    assert len(compared["products"]) == 4
    for record in compared["products"]:
        assert record["ratio"] == {"ratio": 3.0, "low": 3.0, "high": 3.0}
        assert record["int4"]["median"] == 0.5  # one microsecond for two calls
        share = record["int4_bytes"] / 0.5e-6 / 1e9
        assert record["share_of_copy_bandwidth"] == pytest.approx(share)
        assert "unavailable" in record["torch_int4"] or "timing" in record["torch_int4"]
    assert [step["ratio"] for step in compared["step"]] == [3.0, 3.0]
    assert compared["step"][0]["int4"] == pytest.approx(1.5)


@pytest.mark.kernels
def test_sweep_times_the_planners_cut_and_others() -> None:
    layers = [Projection("a", 1312, 96, 1)]
    options = {"tokens": (1,), "slices": (1, 2), "warps": (4,), "depths": (4,), "procedure": QUICK}
    sweep = bench_products.sweep_cuts(FixedClock(), layers, **options)  # type: ignore[arg-type]
    assert sweep["complete"]
    cuts = sweep["cuts"]
    assert sum(cut["picked"] for cut in cuts) == 1
    assert {(cut["slices"], cut["warps"]) for cut in cuts if not cut["picked"]} == {(1, 4), (2, 4)}
    stopped = bench_products.sweep_cuts(FixedClock(), layers, seconds=-1.0, **options)  # type: ignore[arg-type]
    assert stopped == {"cuts": [], "complete": False}


@pytest.mark.kernels
def test_threshold_times_three_ways() -> None:
    threshold = bench_products.find_threshold(
        FixedClock(), [Projection("a", 160, 32, 1)], tokens=(17, 70), procedure=QUICK
    )
    # The clock's times alternate from graph to graph.
    ways = [(r["tokens"], r["int4"], r["pieces"], r["dequantized"]) for r in threshold]
    assert ways == [(17, 1.5, 0.5, 1.5), (70, 0.5, 1.5, 0.5)]


@pytest.mark.kernels
def test_latency_ratio_of_the_paper():
    interval = bench.median_ratio([303.9] * 50, [250.9] * 50, n_resamples=100)
    assert round(interval.estimate, 3) == 1.211
    assert bench.median_ratio([1.0, 2.0, 9.0], [1.0, 1.0, 1.0], n_resamples=100).estimate == 2.0


def test_ratio_of_medians_covers_the_truth():
    """Paired trials share their noise: the interval of the ratio is narrow, and it holds the true 1.5."""
    rng = np.random.default_rng(0)
    held = 0
    for trial in range(60):
        noise = rng.lognormal(0.0, 0.2, 50)
        first, second = 1.5 * noise * rng.lognormal(0, 0.02, 50), noise * rng.lognormal(0, 0.02, 50)
        interval = bench.median_ratio(first, second, n_resamples=500, seed=trial)
        assert interval.low <= interval.estimate <= interval.high
        assert interval.high - interval.low < 0.2
        held += interval.low <= 1.5 <= interval.high
    assert held >= 51
    assert bench.median_ratio(first, second, seed=3) == bench.median_ratio(first, second, seed=3)


@pytest.mark.parametrize(("first", "second"), [([1.0], [0.0]), ([0.0], [1.0])])
def test_ratios_need_times_above_zero(first, second):
    with pytest.raises(ConfigError, match="above 0"):
        bench.median_ratio(first, second)
