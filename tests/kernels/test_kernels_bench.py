"""The parts of the benchmarks that need no GPU: statistics, shapes, and both verifications, emulated."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_backend import EmulatedBackend
from kernel_emulation import compiler

from loopq.errors import ConfigError
from loopq.kernels import bench, bench_products, bench_rollout
from loopq.kernels.rollout import RolloutRunner
from loopq.kernels.shapes import HUGINN, MODELS, Projection, weights_per_step

needs_compiler = pytest.mark.skipif(
    compiler() is None, reason="NO C++ COMPILER: verification is NOT emulated here; install g++ or set CXX"
)
CPU = torch.device("cpu")


def test_huginn_is_as_large_as_published() -> None:
    assert weights_per_step(HUGINN) == 1_637_222_400
    assert sum(layer.calls for layer in HUGINN) == 17
    step = sum(layer.calls * layer.int4_bytes() for layer in HUGINN)
    # 0.8445 GB without any padding; tiles of 64 rows fill up 32 rows of K = 5280.
    assert 0.8445e9 <= step <= 0.8445e9 * 1.006
    for layers in MODELS.values():
        assert all(layer.in_features % 32 == 0 and layer.out_features % 16 == 0 for layer in layers)


def test_paired_bootstrap_covers_the_truth() -> None:
    """Arms share their noise: pairing keeps the interval of the ratio narrow, and it holds the true 1.5."""
    rng = np.random.default_rng(0)
    held = 0
    for trial in range(60):
        noise = rng.lognormal(0.0, 0.2, 50)
        first, second = 1.5 * noise * rng.lognormal(0, 0.02, 50), noise * rng.lognormal(0, 0.02, 50)
        ratio, low, high = bench.paired_bootstrap(first, second, n_resamples=500, seed=trial)
        assert low <= ratio <= high
        assert high - low < 0.2
        held += low <= 1.5 <= high
    assert held >= 51
    assert bench.paired_bootstrap(first, second, seed=3) == bench.paired_bootstrap(first, second, seed=3)


@pytest.mark.parametrize(("first", "second"), [([1.0], [1.0, 2.0]), ([], [])])
def test_unpaired_trials_are_refused(first: list[float], second: list[float]) -> None:
    with pytest.raises(ConfigError, match="paired trials are needed"):
        bench.paired_bootstrap(first, second)


def test_timing_takes_quartiles() -> None:
    assert bench.Timing.of([1.0, 2.0, 3.0, 4.0, 100.0]) == bench.Timing(3.0, 2.0, 4.0)


@needs_compiler
@pytest.mark.parametrize("bulk", [False, True])
def test_verification_of_products(bulk: bool) -> None:
    layers = [Projection("a", 1312, 48, 2), Projection("b", 96, 80, 1)]
    records = bench.verify_products(EmulatedBackend(), layers, CPU, tokens=(1, 7, 40), bulk=bulk)
    assert len(records) == 9
    for record in records:
        assert record["error_float32"] < 1e-6
        assert record["error_rounded"] < 2e-4
        assert 1e-3 < record["error_bfloat16"] < 2.2e-3, "one rounding to bfloat16, no more and no less"
        assert record["repeatable"]
        assert record["same_in_batch"]


@needs_compiler
def test_verification_notices_a_wrong_product() -> None:
    class Wrong(EmulatedBackend):
        def launch(self, kernel, grid, threads, shared_bytes, args):  # type: ignore[no-untyped-def]
            args = list(args)
            args[-2] = np.int32(1)  # one scale row instead of all of them
            super().launch(kernel, grid, threads, shared_bytes, args)

    (record,) = bench.verify_products(Wrong(), [Projection("a", 416, 48, 1)], CPU, tokens=(1,))
    assert record["error_float32"] > 1e-2


@needs_compiler
def test_verification_of_rollouts() -> None:
    size = bench_rollout.LoopSize(width=96, heads=3, inner=160, blocks=2)
    records = bench_rollout.verify_rollout(
        EmulatedBackend(), CPU, size=size, n_steps=2, tokens=(1, 5), graphs=False
    )
    for record in records:
        assert record["n_products"] == 2 * 9
        assert record["replay_equals_eager"] is None
        assert 0 < record["from_eager_loop"] < 0.05
        assert record["hoisted_from_plain"] < 0.02


def test_arms_hold_the_same_weights() -> None:
    size = bench_rollout.LoopSize(width=96, heads=3, inner=160, blocks=1)
    int4 = bench_rollout.random_parts(size, CPU, quantized=True)
    dense = bench_rollout.random_parts(size, CPU, quantized=False)
    for a, b in zip(int4.products(), dense.products(), strict=True):
        assert torch.equal(a.dequantize().bfloat16(), b.weight)
    assert torch.equal(int4.blocks[0].norms[3], dense.blocks[0].norms[3])


def test_the_gpu_script_has_its_sections() -> None:
    """The script loads without a GPU, and the shell file that drives it names sections that exist."""
    root = Path(__file__).resolve().parents[2]
    sections = runpy.run_path(str(root / "benches/kernels/h200.py"), run_name="not main")["SECTIONS"]
    shell = (root / "benches/kernels/run_h200.sh").read_text()
    named = shell.split("sections=${*:-")[1].split("}")[0].split()
    assert set(named) == set(sections)


class FakeGraph:
    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing code with the GPU taken out: graphs run their work, and clocks read fixed times."""

    def captured(work: Callable[[], None], n_calls: int) -> bench.Captured:
        work()
        return bench.Captured(FakeGraph(work), n_calls, work)

    def trials(
        first: Callable[[], object], second: Callable[[], object], n: int = 5
    ) -> tuple[list[float], list[float]]:
        first()
        second()
        return [3.0] * n, [1.0] * n

    monkeypatch.setattr(bench.Captured, "of", captured)
    monkeypatch.setattr(bench, "_event_times", lambda work, repeats: [64.0] * repeats)
    for module in (bench_products, bench_rollout):
        monkeypatch.setattr(module, "paired_trials", trials)
    monkeypatch.setattr(bench_products, "CALLS_PER_GRAPH", 2)
    monkeypatch.setattr(bench_products, "COLD_BYTES", 1)


@needs_compiler
@pytest.mark.usefixtures("without_gpu")
def test_comparison_of_products_adds_up() -> None:
    layers = [Projection("a", 1312, 48, 2), Projection("b", 96, 80, 1)]
    found = bench_products.compare_products(EmulatedBackend(), layers, CPU, tokens=(1, 7), bandwidth=1e9)
    assert len(found["products"]) == 4
    for record in found["products"]:
        assert record["ratio"] == {"ratio": 3.0, "low": 3.0, "high": 3.0}
        assert record["int4"]["median"] == 0.5  # one microsecond for two calls
        share = record["int4_bytes"] / 0.5e-6 / 1e9
        assert record["share_of_copy_bandwidth"] == pytest.approx(share)
        assert "unavailable" in record["torch_int4"] or "timing" in record["torch_int4"]
    assert [step["ratio"] for step in found["step"]] == [3.0, 3.0]
    assert found["step"][0]["int4"] == pytest.approx(1.5)


@needs_compiler
@pytest.mark.usefixtures("without_gpu")
def test_sweep_times_the_planners_cut_and_others() -> None:
    layers = [Projection("a", 1312, 96, 1)]
    backend = EmulatedBackend()
    found = bench_products.sweep_cuts(
        backend, layers, CPU, tokens=(1,), slices=(1, 2), warps=(4,), depths=(4,)
    )
    assert sum(record["picked"] for record in found) == 2, "one per way of bringing weights in"
    assert {(record["slices"], record["warps"]) for record in found if not record["picked"]} == {
        (1, 4),
        (2, 4),
    }


@needs_compiler
@pytest.mark.usefixtures("without_gpu")
def test_comparison_of_rollouts_pairs_like_with_like(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RolloutRunner.run
    monkeypatch.setattr(RolloutRunner, "capture", lambda *_: None)
    monkeypatch.setattr(RolloutRunner, "run", lambda self, s, e, n, graph: run(self, s, e, n))
    size = bench_rollout.LoopSize(width=96, heads=3, inner=160, blocks=1)
    (found,) = bench_rollout.compare_rollouts(
        {"plain": EmulatedBackend()}, CPU, size=size, n_steps=1, tokens=(2,)
    )
    assert set(found["ratios"]) == {
        "bf16_graph_plain / int4_graph_plain",
        "bf16_graph_plain_hoisted / int4_graph_plain_hoisted",
        "bf16_eager / int4_eager",
        "bf16_eager / int4_graph_plain",
    }
    assert all(ratio["ratio"] == 3.0 for ratio in found["ratios"].values())
    assert found["milliseconds"]["bf16_eager"]["median"] == pytest.approx(3e-3)
