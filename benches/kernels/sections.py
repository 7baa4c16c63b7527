"""Sections of the GPU bench that measure the kernels; `benches/gpu.sh` runs them.

A dry run goes through a section's every line on tiny shapes with the host emulation (tests/support/cuda) in the GPU's
place: nothing it reports as a time means anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benches.kernels.shapes import HUGINN, MODELS, Projection

#: Puts what a section has found so far into the record.
Keep = Callable[[dict[str, Any]], None]
#: Takes seconds, whether the run is dry, and where findings go.
Section = Callable[[float, bool, Keep], None]


@dataclass(frozen=True)
class Setting:
    """Where and on what the sections run."""

    device_name: str
    backend: Any
    procedure: Any
    layers: tuple[Projection, ...]
    edges: tuple[Projection, ...]
    models: dict[str, tuple[Projection, ...]]
    tokens: tuple[int, ...]
    edge_tokens: tuple[int, ...]
    sweep: dict[str, Any]


def on_gpu(seconds: float) -> Setting:
    import torch

    from benches.kernels.procedure import Procedure
    from benches.kernels.timed import TimedBackend

    return Setting(
        device_name=torch.cuda.get_device_name(0),
        backend=TimedBackend(0),
        procedure=Procedure(),
        layers=HUGINN,
        edges=tuple(Projection("edge", k, n, 1) for k, n in ((32, 16), (96, 48), (5280, 5296), (10560, 16))),
        models={name: layers for name, layers in MODELS.items() if layers is not HUGINN},
        tokens=(1, 7, 16),
        edge_tokens=(1, 8, 9, 24, 33, 64, 65, 128, 200),
        sweep={"seconds": seconds},
    )


def emulated(seconds: float) -> Setting:
    from benches.kernels.procedure import Procedure
    from tests.support.cuda.backend import EmulatedBackend

    tiny = tuple(Projection(layer.name, 96 if layer.in_features < 8000 else 160, 32, 1) for layer in HUGINN)
    return Setting(
        device_name="emulation",
        backend=EmulatedBackend(),
        procedure=Procedure(warm_ups=0, trials=2, cold_bytes=1, calls_per_graph=1, copy_bytes=1 << 16),
        layers=tiny,
        edges=(Projection("edge", 32, 16, 1), Projection("edge", 96, 48, 1)),
        models=dict.fromkeys(list(MODELS)[1:3], tiny[:1]),
        tokens=(1, 7, 16),
        edge_tokens=(1, 9, 33),
        sweep={"seconds": seconds, "slices": (1, 2), "warps": (4,), "depths": (4,), "tokens": (1,)},
    )


# ---- sections ----------------------------------------------------------------------------------------------------


def exact(s: Setting) -> dict[str, Any]:
    """51 comparisons with float64, and edges at other group sizes."""
    from benches.kernels.procedure import verify_products

    comparisons = verify_products(s.backend, s.layers, tokens=s.tokens)
    records: dict[str, Any] = {
        "cp_async": {
            "comparisons": len(comparisons),
            "worst_float32": max(r["error_float32"] for r in comparisons),
            "worst_rounded": max(r["error_rounded"] for r in comparisons),
            "worst_bfloat16": max(r["error_bfloat16"] for r in comparisons),
            "all_repeatable": all(r["repeatable"] for r in comparisons),
            "all_same_in_batch": all(r["same_in_batch"] for r in comparisons),
            "all": comparisons,
        }
    }
    for group in (32, 64, 128, 256, -1):
        comparisons = verify_products(s.backend, s.edges, tokens=s.edge_tokens, group_size=group)
        worst = max(r["error_float32"] for r in comparisons)
        records[f"edges_g{group}"] = {"worst_float32": worst, "comparisons": len(comparisons)}
    return records


def small(s: Setting) -> dict[str, Any]:
    """A small case of everything, for compute-sanitizer."""
    from benches.kernels.procedure import verify_products
    from benches.kernels.solver import verify_solver

    layers = [Projection("small", 1312, 336, 1)] if s.device_name != "emulation" else s.edges
    tokens = (1, 7, 16, 40, 130)
    comparisons = [
        verify_products(s.backend, layers, tokens=tokens)
    ]  # a list of one, as older records have two
    solver = verify_solver(s.backend.device, (2, 16, 64) if s.device_name != "emulation" else (2,))
    return {"products": comparisons, "solver": solver}


def products(s: Setting) -> dict[str, Any]:
    """Bandwidth shares and cuBLAS ratios of Huginn's products."""
    from benches.kernels.procedure import copy_bandwidth
    from benches.kernels.products import compare_products

    shared = {
        "bandwidth": copy_bandwidth(s.backend, s.procedure),
        "procedure": s.procedure,
        "tokens": s.tokens,
    }
    return {"cp_async": compare_products(s.backend, s.layers, **shared)}


def models(s: Setting) -> dict[str, Any]:
    """The other looped models' products."""
    from benches.kernels.procedure import copy_bandwidth
    from benches.kernels.products import compare_products

    shared = {
        "bandwidth": copy_bandwidth(s.backend, s.procedure),
        "procedure": s.procedure,
        "tokens": s.tokens,
    }
    return {name: compare_products(s.backend, layers, **shared) for name, layers in s.models.items()}


def sweep(s: Setting) -> dict[str, Any]:
    """Other cuts than the planner's."""
    from benches.kernels.products import sweep_cuts

    return sweep_cuts(s.backend, s.layers, procedure=s.procedure, **s.sweep)


def threshold(s: Setting) -> dict[str, Any]:
    """Kernels against dequantise-and-multiply, to place TOKENS_PER_LAUNCH and INT4_KERNEL_TOKENS."""
    from benches.kernels.products import find_threshold

    return {"threshold": find_threshold(s.backend, s.layers, procedure=s.procedure)}


SECTIONS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    f.__name__: f for f in (exact, small, products, models, threshold, sweep)
}


def section(name: str) -> Section:
    """A section as the bench runs it."""

    def run(seconds: float, dry: bool, keep: Keep) -> None:
        keep(SECTIONS[name]((emulated if dry else on_gpu)(seconds)))

    return run


# ---- targets -----------------------------------------------------------------------------------------------------

Rows = list[tuple[str, str, str]]
SHARES = {"mlp.fc": 0.70, "mlp.proj": 0.70, "attn.Wqkv": 0.70, "adapter": 0.60, "attn.proj": 0.50}


def _met(holds: bool) -> str:
    return "met" if holds else "NOT MET"


def _exact_rows(data: dict[str, Any]) -> Rows:
    rows = []
    for way, d in data.items():
        if way == "seconds" or way.startswith("edges"):
            continue
        holds = d["worst_float32"] <= 3e-6 and d["worst_rounded"] <= 2e-4
        holds = holds and d["all_repeatable"] and d["all_same_in_batch"]
        rows.append(
            (
                f"{d['comparisons']} comparisons, {way}: float32 3e-6, bf16 2e-4 of the rounded; same bits again and "
                f"in a batch",
                f"{d['worst_float32']:.1e}, {d['worst_rounded']:.1e} (against float64 {d['worst_bfloat16']:.2e})",
                _met(holds),
            )
        )
    edges = max(d["worst_float32"] for name, d in data.items() if name.startswith("edges"))
    return [*rows, ("edges at other group sizes: float32 3e-6", f"{edges:.1e}", _met(edges <= 3e-6))]


def _sanitizer_rows(data: dict[str, Any]) -> Rows:
    tools = {name: verdict for name, verdict in data.items() if name != "seconds"}
    return [
        (f"compute-sanitizer {n} clean", v, "open" if "not" in v else _met(v == "clean"))
        for n, v in tools.items()
    ]


def _product_rows(data: dict[str, Any]) -> Rows:
    rows = []
    for way, d in data.items():
        if way == "seconds":
            continue
        times: dict[tuple[str, int], float] = {}
        for p in d["products"]:
            share, target = p["share_of_copy_bandwidth"], SHARES[p["layer"]]
            times[p["layer"], p["tokens"]] = p["int4"]["median"]
            rows.append(
                (
                    f"{p['layer']}, {p['tokens']} tokens, {way}: {target:.0%} of copy bandwidth",
                    f"{share:.0%} ({p['int4']['median']:.2f} us; cuBLAS {p['cublas_bf16']['median']:.2f} us)",
                    _met(share >= target),
                )
            )
        for layer in SHARES:
            slower = times[layer, 16] / times[layer, 1]
            rows.append(
                (f"{layer}, {way}: 16 tokens within 1.10x of 1", f"{slower:.3f}x", _met(slower <= 1.10))
            )
        one = [p for p in d["products"] if p["tokens"] == 1]
        slope, fixed = np.polyfit([p["int4_bytes"] for p in one], [p["int4"]["median"] for p in one], 1)
        text = f"{1e-6 / slope:.1f} TB/s and {fixed:.1f} us a launch"
        rows.append((f"line through the layers' times, 1 token, {way}", text, "reported"))
        for step in d["step"]:
            target_text = f"17 projections, {step['tokens']} tokens, {way}: 2.7x cuBLAS bf16"
            rows.append((target_text, f"{step['ratio']:.2f}x", _met(step["ratio"] >= 2.7)))
    return rows


def _model_rows(data: dict[str, Any]) -> Rows:
    return [
        (
            f"{name}, {step['tokens']} tokens: a step's products over cuBLAS bf16",
            f"{step['ratio']:.2f}x",
            "reported",
        )
        for name, d in data.items()
        if name != "seconds"
        for step in d["step"]
    ]


def _threshold_rows(data: dict[str, Any]) -> Rows:
    rows = []
    for layer in dict.fromkeys(r["layer"] for r in data["threshold"]):
        wins = [
            r["tokens"] for r in data["threshold"] if r["layer"] == layer and r["dequantized"] < r["int4"]
        ]
        text = f"from {min(wins)} tokens" if wins else "nowhere up to 128 tokens"
        rows.append((f"{layer}: dequantise-and-multiply wins", text, "reported"))
    return rows


def _sweep_rows(data: dict[str, Any]) -> Rows:
    rows = []
    for layer, tokens in dict.fromkeys((r["layer"], r["tokens"]) for r in data["cuts"]):
        here = [r for r in data["cuts"] if (r["layer"], r["tokens"]) == (layer, tokens)]
        best = min(here, key=lambda r: r["int4"]["median"])
        picked = min((r for r in here if r["picked"]), key=lambda r: r["int4"]["median"])
        cut = f"{best['slices']} slices, {best['warps']} warps, {best['stages']} deep"
        text = f"{best['int4']['median']:.2f} us ({cut}); planner's {picked['int4']['median']:.2f} us"
        rows.append((f"{layer}, {tokens} tokens: fastest cut", text, "reported"))
    return rows


ROWS: dict[str, Callable[[dict[str, Any]], Rows]] = {
    "exact": _exact_rows,
    "sanitizer": _sanitizer_rows,
    "products": _product_rows,
    "models": _model_rows,
    "threshold": _threshold_rows,
    "sweep": _sweep_rows,
}
