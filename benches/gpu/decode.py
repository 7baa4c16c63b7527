"""What a GPU is needed for first: tokens per second of `loopq run`, and the int4 kernel beside cuBLAS and Marlin.

Models have the full shapes of Huginn-3.5B and Ouro-1.4B in the zoo's classes, with random weights and random codes:
speed does not depend on what they are. Each runs in bfloat16 and in int4, launched one by one and as one CUDA graph.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from benches.gpu import phases
from benches.kernels import sections as kernels
from benches.kernels.procedure import verify_products
from benches.kernels.products import compare_products
from benches.kernels.sections import Keep, Rows
from loopq.layers.grids.integer import Integer
from loopq.layers.layer import QuantizedLayer
from loopq.runtime import graph
from loopq.runtime.generate import Decoder, Generation
from loopq.runtime.linear import LAYOUTS, QuantLinear
from loopq.systems import find_system

WAYS = ("bfloat16", "bfloat16, graph", "int4", "int4, graph")
N_PROMPT, N_TOKENS, ROUNDS = 64, 32, 5
#: Share of the time at which a part begins nothing more.
UNTIL = {"huginn-3.5b": 0.45, "ouro-1.4b": 0.75}


def huginn(dry: bool) -> nn.Module:
    """Huginn-3.5B's shape."""
    import benches.zoo.models

    size = {"n_embd": 5280, "n_heads": 55, "intermediate_size": 17920, "vocab_size": 65536, "mean_recurrence": 32,
            "n_prelude": 2, "n_core": 4, "n_coda": 2, "block_size": 4096}  # fmt: skip
    tiny = {"n_embd": 32, "n_heads": 2, "intermediate_size": 48, "vocab_size": 64, "mean_recurrence": 2,
            "n_prelude": 1, "n_core": 1, "n_coda": 1, "block_size": 128}  # fmt: skip
    return benches.zoo.models.build({"model_type": "loopq-zoo-huginn", **(tiny if dry else size)})


SHAPES: dict[str, Callable[[bool], nn.Module]] = {"huginn-3.5b": huginn, "ouro-1.4b": phases.ouro}


def section(seconds: float, dry: bool, keep: Keep) -> None:
    """Check the kernel, time both models, then the kernel alone; keep what is known after each part."""
    began = time.monotonic()
    setting = (kernels.emulated if dry else kernels.on_gpu)(seconds)
    checked = verify_products(setting.backend, setting.layers[:1] if dry else setting.layers, tokens=(1,))
    record: dict[str, Any] = {"worst_float32": max(r["error_float32"] for r in checked), "models": {}}
    keep(record)
    for name, shape in SHAPES.items():
        timed: dict[str, Any] = {"no_graph": {}, "tokens_per_s": {}}
        record["models"][name] = timed
        with _device(dry) as device:
            until = began + UNTIL[name] * seconds
            _decode(shape(dry) if dry else _on_gpu(shape), device, dry, until, timed, lambda: keep(record))
        if not dry:
            torch.cuda.empty_cache()
    record["products"] = {}
    for name, layers in {"huginn-3.5b": setting.layers, **setting.models}.items():
        if name in SHAPES:
            tokens = setting.tokens[:1]
            record["products"][name] = compare_products(
                setting.backend, layers[:1] if dry else layers, tokens=tokens, procedure=setting.procedure
            )
            keep(record)


def _on_gpu(shape: Callable[[bool], nn.Module]) -> nn.Module:
    return phases.made(phases.Run(shape, "cuda", {}, 0), "cuda", dry=False)


@contextlib.contextmanager
def _device(dry: bool) -> Iterator[str]:
    """The GPU, or in a dry run a second device that the processor emulates."""
    if not dry:
        yield "cuda"
        return
    from tests.support.accelerator import DEVICE, accelerator

    with (
        accelerator(),
        patch.dict(graph.RECORDERS, {DEVICE: _again}, clear=True),
        patch.object(LAYOUTS["codes"], "devices", (DEVICE,)),
    ):
        yield DEVICE


def _decode(
    model: nn.Module, device: str, dry: bool, until: float, timed: dict[str, Any], keep: Callable[[], None]
) -> None:
    """Time each way in turn, again and again, and keep the best speed of each."""
    coded = into_codes(model, "codes" if dry else None).to(device)
    model = model.to(device)
    timed["parameters"] = sum(p.numel() for p in model.parameters())
    decoders: dict[str, Decoder] = {}
    speeds = timed["tokens_per_s"]
    for way in WAYS:
        system = find_system(coded if way.startswith("int4") else model)
        recorded = way.endswith("graph")
        with patch.dict(graph.RECORDERS, graph.RECORDERS if recorded else {}, clear=True):
            decoders[way] = Decoder(system, system.n_steps, Generation(n_tokens=N_TOKENS))
        if recorded:
            timed["no_graph"][way] = decoders[way].declined.get("graph", "")
    keep()
    prompt = [3 + i % 61 for i in range(8 if dry else N_PROMPT)]
    for _ in range(1 if dry else ROUNDS):
        for way, decoder in decoders.items():
            speeds[way] = max(speeds.get(way, 0.0), speed(decoder, prompt, 1 if dry else N_TOKENS))
            keep()
        if time.monotonic() > until:
            break


def into_codes(model: nn.Module, layout: str | None = None) -> nn.Module:
    """A copy with random int4 codes in the place of its looped weights, in groups of 128, or of 32 in narrow layers."""
    coded = copy.deepcopy(model)
    rng = np.random.default_rng(0)
    system = find_system(coded)
    for shared in system.shared_parameters(system.n_steps):
        name = shared.name.removesuffix(".weight")
        weight = coded.get_submodule(name).weight.detach()
        rows, columns = weight.shape
        group = 128 if columns >= 128 else 32
        codes = rng.integers(-8, 8, (rows, columns), dtype=np.int8)
        # The codes' standard deviation is 4.6.
        scales = np.full((rows, -(-columns // group)), float(weight.float().std()) / 4.6, np.float32)
        layer = QuantizedLayer(shared.name, Integer(4, group, "bfloat16"), codes, scales, None)
        parent, _, child = name.rpartition(".")
        setattr(
            coded.get_submodule(parent), child, QuantLinear.from_layer(layer, layout=layout).to(weight.dtype)
        )
    return coded


def speed(decoder: Decoder, prompt: list[int], n_tokens: int) -> float:
    """Tokens per second after a prompt and the token that is recorded."""
    decoder.restart()
    ids = list(prompt)
    for n in range(n_tokens + 2):
        if n == 2:
            start = time.perf_counter()
        ids.append(int(decoder(ids).numpy().argmax()))
    return n_tokens / (time.perf_counter() - start)


def _again(step: graph.Step, undo: Any) -> tuple[Any, torch.Tensor]:
    """A dry run's recorder: calls the step itself."""
    logits = step().clone()
    undo()
    return lambda: logits.copy_(step()), logits


def rows(data: dict[str, Any]) -> Rows:
    """Lines of the record's table: the kernel's error, a way of each model each, and the kernel beside others."""
    worst = data["worst_float32"]
    lines: Rows = [
        ("int4 kernel against float64, 1 token: 3e-6", f"{worst:.1e}", "met" if worst <= 3e-6 else "NOT MET")
    ]
    for name, timed in data["models"].items():
        lines += [
            (f"{name}: a step of {way} as one CUDA graph", why or "recorded", "NOT MET" if why else "met")
            for way, why in timed["no_graph"].items()
        ]
        speeds = timed["tokens_per_s"]
        lines += [
            (
                f"{name}: tokens/s, {way}",
                f"{speeds[way]:.1f}, {speeds[way] / speeds['bfloat16']:.2f} of bfloat16's",
                "reported",
            )
            for way in WAYS
            if way in speeds
        ]
    return lines + [line for name, d in data.get("products", {}).items() for line in _products(name, d)]


def _products(name: str, data: dict[str, Any]) -> Rows:
    """The kernel's time of each layer beside those of others."""
    lines: Rows = []
    for p in data["products"]:
        others = {"cuBLAS": {"timing": p["cublas_bf16"]}, "torch": p["torch_int4"], "Marlin": p["marlin"]}
        text = "; ".join(
            f"{other} {t['timing']['median']:.2f} us"
            if "timing" in t
            else f"{other}: {t['unavailable'][:80]}"
            for other, t in others.items()
        )
        lines.append(
            (
                f"{name}, {p['layer']}, {p['tokens']} tokens",
                f"{p['int4']['median']:.2f} us; {text}",
                "reported",
            )
        )
    for step in data["step"]:
        lines.append(
            (
                f"{name}, {step['tokens']} tokens: a step's products over cuBLAS bf16",
                f"{step['ratio']:.2f}x",
                "reported",
            )
        )
    return lines
