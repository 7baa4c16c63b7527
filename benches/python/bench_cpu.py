"""Products with packed codes on this processor beside torch's, in one process, interleaved.

    python benches/python/bench_cpu.py [--threads 2] [--trials 15] [--models huginn ouro] [--record FILE]

Four ways to multiply are timed right after each other on the same activations: loopq's ``lq-cpu`` layout with float
and with int8 activations, torch's bfloat16 `F.linear`, and torch's own int4 product `_weight_int4pack_mm_for_cpu`. Out
of cache, each call takes another copy of its weight, and the copies together exceed the last-level cache. In cache,
all calls take one copy of a weight that fits. The same run measures the speed at which this process reads memory, and
a buffer that fits the cache. Every result is compared with float64 before anything is timed. Where the processor has no
bfloat16 instructions, torch's float32 product of the same weights is timed too.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import write

from benches.kernels.shapes import Projection, shapes_of
from loopq import _native
from loopq.layers.grids.integer import Integer
from loopq.layers.grids.trellis import OnTrellis, Trellis
from loopq.layers.layer import QuantizedLayer
from loopq.runtime.linear import QuantLinear

GROUP = 128
# Relative error in the l2 norm that a way may show against float64 on the stored codes.
BOUNDS = {"loopq": 2e-3, "loopq int8": 2e-2, "torch bf16": 6e-3, "torch int4": 6e-3}
if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
    BOUNDS["torch f32"] = 1e-5


@dataclass
class Weights:
    """One copy of a layer's weight in every way's own form."""

    ours: QuantLinear
    int8: QuantLinear
    dense: torch.Tensor
    int4: torch.Tensor
    int4_scales: torch.Tensor
    dense32: torch.Tensor | None = None

    @classmethod
    def random(cls, layer: Projection, seed: int, dense: bool = True) -> Weights:
        rng = np.random.default_rng(seed)
        codes = rng.integers(-8, 8, (layer.out_features, layer.in_features), dtype=np.int8)
        groups = -(-layer.in_features // GROUP)
        drawn = rng.uniform(0.5, 1.5, (layer.out_features, groups)) / (6 * layer.in_features**0.5)
        scales = torch.from_numpy(drawn.astype(np.float32)).bfloat16()
        grid = Integer(4, GROUP, "bfloat16")
        quantized = QuantizedLayer("layer.weight", grid, codes, scales.float().numpy(), None)
        ours = QuantLinear.from_layer(quantized, layout="lq-cpu")
        int8 = QuantLinear("lq-cpu", ours.qweight, ours.scales, held=ours.held).rounding("int8")
        # torch's operator takes whole groups: the last is filled with the code of zero.
        padded = np.zeros((layer.out_features, groups * GROUP), np.int32)
        padded[:, : layer.in_features] = codes
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.from_numpy(padded + 8), 1)
        both = torch.stack([scales.t(), torch.zeros_like(scales.t())], dim=2).contiguous()
        exact = ours.dequantize() if dense else torch.empty(0)
        kept = exact if "torch f32" in BOUNDS else None
        return cls(ours, int8, exact.bfloat16(), packed, both, kept)


def ways(weights: Weights, x: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Each way to multiply."""
    filled, linear = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)), torch.nn.functional.linear
    products = {
        "loopq": lambda: weights.ours(x),
        "loopq int8": lambda: weights.int8(x),
        "torch bf16": lambda: linear(x, weights.dense),
        "torch int4": lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(
            filled, weights.int4, GROUP, weights.int4_scales
        ),
    }
    if weights.dense32 is not None:
        dense32, x32 = weights.dense32, x.float()
        products["torch f32"] = lambda: linear(x32, dense32)
    return products


def check(weights: Weights, x: torch.Tensor) -> dict[str, float]:
    """Relative error of every way against float64 on the stored codes."""
    exact = x.double() @ weights.ours.dequantize().double().t()
    errors = {
        way: float((run().double() - exact).norm() / exact.norm()) for way, run in ways(weights, x).items()
    }
    for way, error in errors.items():
        assert error < BOUNDS[way], (way, error)
    return errors


def best_of(run: Callable[[], object], trials: int) -> float:
    times = []
    for _ in range(trials):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def read_speed(n_bytes: int, threads: int, trials: int) -> float:
    """Bytes per second that `threads` threads read of a buffer of that size."""
    buffer = np.zeros(n_bytes, np.uint8)
    buffer[:] = 1
    repeats = max(1, (64 << 20) // n_bytes)
    return n_bytes * repeats / best_of(lambda: _native.cpu_read(buffer, repeats, threads), trials)


def interleaved(runs: dict[str, list[Callable[[], object]]], trials: int) -> dict[str, list[float]]:
    """Seconds of each trial of each way, in turns; a trial is one call with each copy."""
    times: dict[str, list[float]] = {way: [] for way in runs}
    for trial in range(trials + 1):
        for way in list(runs) if trial % 2 else list(reversed(runs)):
            start = time.perf_counter()
            for run in runs[way]:
                run()
            if trial:  # the first warms up
                times[way].append((time.perf_counter() - start) / len(runs[way]))
    return times


def bench_layer(layer: Projection, tokens: int, cold: int, trials: int) -> dict[str, Any]:
    """One layer: `cold` bytes of copies of the int4 weight, or one copy for 0."""
    n_copies = max(2, -(-cold // layer.int4_bytes(GROUP))) if cold else 1
    copies = [Weights.random(layer, seed) for seed in range(n_copies)]
    x = torch.randn(tokens, layer.in_features, generator=torch.Generator().manual_seed(1)).bfloat16()
    errors = check(copies[0], x)
    runs = {way: [ways(weights, x)[way] for weights in copies] for way in BOUNDS}
    times = interleaved(runs, trials)
    n_bytes = copies[0].ours.qweight.numel()
    row: dict[str, Any] = {
        "layer": layer.name, "in": layer.in_features, "out": layer.out_features, "tokens": tokens,
        "copies": n_copies, "bytes": n_bytes, "errors": errors,
        "us": {way: round(1e6 * statistics.median(t), 1) for way, t in times.items()},
    }  # fmt: skip
    ours = times["loopq"]
    row["gb_per_s"] = round(n_bytes / statistics.median(ours) / 1e9, 2)
    row["over"] = {
        way: round(statistics.median(t / o for t, o in zip(times[way], ours, strict=True)), 2)
        for way in BOUNDS
        if way != "loopq"
    }
    return row


def bench_trellis(layer: Projection, tokens: int, trials: int) -> list[dict[str, Any]]:
    """One layer in cache with codes on a trellis of 1,024 states, beside plain codes and torch's bfloat16."""
    rng, rows = np.random.default_rng(0), []
    groups = -(-layer.in_features // GROUP)
    x = torch.randn(tokens, layer.in_features, generator=torch.Generator().manual_seed(1)).bfloat16()
    for bits in (2, 3, 4):
        top = 1 << (bits - 1)
        codes = rng.integers(-top, top, (layer.out_features, layer.in_features), dtype=np.int8)
        scales = rng.uniform(0.5, 1.5, (layer.out_features, groups)).astype(np.float16).astype(np.float32)
        given = (bits, GROUP, "float16")
        coded, plain = (
            QuantLinear.from_layer(QuantizedLayer("layer.weight", grid, codes, scales, None), layout="lq-cpu")
            for grid in (OnTrellis(*given, Trellis(10, 512)), Integer(*given))
        )
        exact = x.double() @ coded.dequantize().double().t()
        error = float((coded(x).double() - exact).norm() / exact.norm())
        assert error < BOUNDS["loopq"], error
        dense = coded.dequantize().bfloat16()
        runs: dict[str, list[Callable[[], object]]] = {
            "trellis": [lambda coded=coded: coded(x)],  # type: ignore[misc]
            "plain": [lambda plain=plain: plain(x)],  # type: ignore[misc]
            "torch bf16": [lambda dense=dense: torch.nn.functional.linear(x, dense)],  # type: ignore[misc]
        }
        times = {way: statistics.median(t) for way, t in interleaved(runs, trials).items()}
        rows.append({
            "layer": layer.name, "in": layer.in_features, "out": layer.out_features, "tokens": tokens, "bits": bits,
            "bytes_per_weight": coded.qweight.numel() / layer.n_weights, "error": error,
            "us": {way: round(1e6 * t, 1) for way, t in times.items()},
        })  # fmt: skip
    return rows


class Core(torch.nn.Module):
    """The looped core of a model, for one token: attention is its value, since there is nothing else to attend to."""

    def __init__(self, layers: Sequence[Projection], linear: Callable[[Projection], torch.nn.Module]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleList(linear(layer) for layer in layers) for _ in range(layers[0].calls)
        )
        self.width, self.inner = layers[0].in_features, layers[3].in_features

    def forward(self, x: torch.Tensor, n_steps: int) -> torch.Tensor:
        norm, shape = torch.nn.functional.rms_norm, (self.width,)
        for _ in range(n_steps):
            for qkv, out, up, down in self.blocks:
                x = x + out(qkv(norm(x, shape))[:, -self.width :])
                inner = up(norm(x, shape))
                if inner.shape[1] > self.inner:
                    inner = torch.nn.functional.silu(inner[:, : self.inner]) * inner[:, self.inner :]
                else:
                    inner = torch.nn.functional.gelu(inner)
                x = x + down(inner)
        return x


def bench_loop(model: str, n_steps: int, trials: int) -> dict[str, Any]:
    """A token through `n_steps` steps of a core with random weights, held as codes and as bfloat16.

    ``model`` is the name of one, or with ``:1`` behind it a core of one of its blocks.
    """
    name, _, n_blocks = model.partition(":")
    layers = next(iter(shapes_of(name).values()))
    if n_blocks:
        layers = tuple(dataclasses.replace(layer, calls=int(n_blocks)) for layer in layers)
    seeds = iter(range(10_000))
    packed = Core(layers, lambda layer: Weights.random(layer, next(seeds), dense=False).ours)
    plain = Core(layers, lambda layer: torch.nn.Linear(layer.in_features, layer.out_features, bias=False))
    for ours, dense in zip(packed.blocks, plain.blocks, strict=True):
        for layer, linear in zip(ours, dense, strict=True):
            linear.weight.data = layer.dequantize()
    x = torch.randn(1, packed.width, generator=torch.Generator().manual_seed(1))
    # In float32, one step: after it the two drift apart by their own roundings.
    error = float((packed(x, 1) - plain(x, 1)).norm() / plain(x, 1).norm())
    assert error < 1e-4, error
    x, plain = x.bfloat16(), plain.bfloat16()
    runs = {"loopq": [lambda: packed(x, n_steps)], "torch bf16": [lambda: plain(x, n_steps)]}
    times = interleaved(runs, trials)
    n_weights = sum(layer.n_weights * layer.calls for layer in layers)
    n_bytes = sum(layer.int4_bytes(GROUP) * layer.calls for layer in layers)
    ratios = [t / o for t, o in zip(times["torch bf16"], times["loopq"], strict=True)]
    return {
        "model": model, "steps": n_steps, "core_mb": {"int4": n_bytes >> 20, "bf16": 2 * n_weights >> 20},
        "ms": {way: round(1e3 * statistics.median(t), 2) for way, t in times.items()},
        "gb_per_s": round(n_steps * n_bytes / statistics.median(times["loopq"]) / 1e9, 2),
        "over_bf16": round(statistics.median(ratios), 2), "error": error,
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    us, over = row["us"], row["over"]
    others = "; ".join(f"{way} {us[way]:.0f} ({over[way]:.2f}x)" for way in over)
    return (
        f"{row['layer']:>12} {row['in']:>6} x {row['out']:<6} {row['tokens']:>4} tokens, "
        f"{row['copies']:>3} copies: {us['loopq']:>8.0f} us {row['gb_per_s']:>6.1f} GB/s; {others}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benches and print or record them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--trials", type=int, default=15)
    parser.add_argument("--models", nargs="*", default=["huginn", "ouro"])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 16, 512])
    parser.add_argument("--cold", type=int, default=320 << 20, help="bytes of int4 copies, out of cache")
    parser.add_argument("--cache", type=int, default=24 << 20, help="largest weight measured in cache")
    parser.add_argument(
        "--loops", nargs="*", default=["parcae-140m", "parcae-1.3b:1", "loopformer-278m", "parcae-1.3b"]
    )
    parser.add_argument("--steps", type=int, nargs="*", default=[8, 32])
    parser.add_argument(
        "--trellis", type=int, nargs="*", default=[1, 16], help="tokens, for codes on a trellis"
    )
    parser.add_argument("--note", default="", help="what else the machine did")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    speeds = {
        "memory": read_speed(1 << 30, args.threads, 5),
        "cache": read_speed(args.cache, args.threads, 9),
    }
    print(
        f"reads: memory {speeds['memory'] / 1e9:.1f} GB/s, {args.cache >> 20} MB {speeds['cache'] / 1e9:.1f} GB/s"
    )
    load = os.getloadavg()[0]
    results = []
    with torch.inference_mode():
        for model in args.models:
            for layer in next(iter(shapes_of(model).values())):
                for tokens in args.tokens:
                    warm = layer.int4_bytes(GROUP) <= args.cache
                    for cold in (args.cold, 0) if warm else (args.cold,):
                        result = bench_layer(layer, tokens, cold, args.trials if tokens < 100 else 3)
                        result |= {
                            "model": model,
                            "share": round(result["gb_per_s"] * 1e9 / speeds["memory"], 3),
                        }
                        print(line(result), flush=True)
                        results.append(result)
        loops = [bench_loop(model, n, args.trials) for model in args.loops for n in args.steps]
        ouro = next(iter(shapes_of("ouro").values()))
        on_trellis = [row for n in args.trellis for x in ouro for row in bench_trellis(x, n, args.trials)]
    for result in [*loops, *on_trellis]:
        print(result)
    write(
        args.record,
        results,
        loops=loops,
        trellis=on_trellis,
        speeds=speeds,
        threads=args.threads,
        note=args.note,
        load_before=round(load, 1),
        torch=torch.__version__,
    )


if __name__ == "__main__":
    main()
