"""Codes and scales of every method and calibration mode on one small model, as checksums for refactoring.

The model computes with small whole numbers over powers of two, so that its full-precision rollouts have the same bits
on every processor. `python -m tests.golden.quantized` writes the record `quantized.json` and `quantized.npz` anew.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn

import loopq

HERE = Path(__file__).parent
WIDTH, HIDDEN, VOCABULARY, STEPS = 24, 40, 16, 4


def grid(x):
    """Round to eighths within [-4, 4]; gradients pass straight through."""
    rounded = (x * 8).round().clamp(-32, 32) / 8
    return rounded.detach() + (x - x.detach())


class ExactLoop(nn.Module):
    """A loop with an adapter, three layers that share an input, an MLP and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.adapter = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH, bias=False)
        self.fc = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        random = np.random.RandomState(7)
        with torch.no_grad():
            for name, p in self.named_parameters():
                spread = 16 if name == "embed.weight" else 12
                p.copy_(torch.from_numpy(random.randint(-spread, spread + 1, tuple(p.shape)) / 16.0))

    def forward(self, ids):
        e = self.embed(ids)
        state = torch.zeros_like(e)
        for _ in range(STEPS):
            h = grid(self.adapter(torch.cat([state, e], dim=-1)) / 2)
            past = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], dim=1)
            mixed = grid(self.q(h) / 4 + self.k(h).roll(1, -1) / 4 + self.v(h) / 4) + past
            state = grid(mixed + self.proj(grid(torch.relu(self.fc(mixed) / 2))) / 4)
        return self.head(state)


def ids():
    """Twelve prompts of ten tokens."""
    return np.random.RandomState(3).randint(0, VOCABULARY, (12, 10)).tolist()


def digest(layers):
    """SHA-256 over codes, scales, zero points and input transforms."""
    total = hashlib.sha256()
    for name in sorted(layers):
        layer = layers[name]
        total.update(
            f"{name} {layer.grid.bits} {layer.grid.group_size} {layer.grid.symmetric} {layer.grid.scale_dtype}".encode()
        )
        for array in (layer.codes, layer.scales, layer.zeros):
            total.update(b"none" if array is None else np.ascontiguousarray(array).tobytes())
        if layer.transform is not None:
            for key, array in sorted(layer.transform.arrays().items()):
                total.update(key.encode() + array.tobytes())
    return total.hexdigest()


def machine():
    """Settings that may change the last bits of products and gradients."""
    info = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (info.read_text().splitlines() if info.is_file() else [])
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.processor()}, torch {torch.__version__}, numpy {np.__version__}"


PAPER = {"method": "gptq", "scale_search": "max"}
G = {**PAPER, "group_size": 16}
CD = {
    "method": "gptq-cd",
    "metric": "inputs",
    "damping_kind": "diagonal",
    "group_size": 16,
    "bits": 3,
    "levels": "even",
}
LOOP = {**CD, "metric": "loop", "metric_draws": 4}
EXACT = {
    **{f"rtn-{b}": {**G, "method": "rtn", "bits": b} for b in (2, 3, 4, 8)},
    "rtn-mse": {**G, "method": "rtn", "bits": 3, "scale_search": "mse"},
    "rtn-asymmetric": {**G, "method": "rtn", "bits": 3, "symmetric": False},
    "rtn-channel": {**PAPER, "method": "rtn", "bits": 4, "group_size": -1},
    **{f"gptq-{b}": {**G, "bits": b} for b in (2, 3, 4, 8)},
    "gptq-channel": {**PAPER, "bits": 4, "group_size": -1},
    "gptq-ragged": {**PAPER, "bits": 4, "group_size": 20},
    "gptq-asymmetric": {**G, "bits": 3, "symmetric": False},
    "gptq-static": {**G, "bits": 3, "scales": "static"},
    "gptq-order": {**G, "bits": 3, "scales": "static", "act_order": True},
    "gptq-mse": {**G, "bits": 3, "scale_search": "mse"},
    "gptq-float32": {**G, "bits": 3, "precision": "float32"},
    "gptq-block": {**G, "bits": 3, "block_size": 5},
    "gptq-scale-bits": {**G, "bits": 4, "scale_dtype": "bfloat16", "scale_bits": 5},
    "gptq-scale-float32": {**G, "bits": 4, "scale_dtype": "float32"},
    "gptq-damping": {**G, "bits": 3, "damping": 0.1},
    **{f"gptq-damping-{k}": {**G, "bits": 3, "damping_kind": k} for k in ("median", "diagonal", "tail")},
    **{
        f"gptq-steps-{n}": {**G, "bits": 3, "steps": s}
        for n, s in (("first", "first"), ("skip-first", "1:"), ("last", "3"))
    },
    **{f"gptq-weights-{w}": {**G, "bits": 3, "step_weights": w} for w in ("balanced", "alpha=1/2")},
    "gptq-equal-rows": {**G, "bits": 3, "inputs": "equal-rows"},
    "gptq-memory": {**G, "bits": 3, "memory": 250_000},
    "gptq-exclude": {**G, "bits": 3, "exclude": ("k.weight",)},
    "gptq-overrides": {
        "bits": 3,
        **G,
        "overrides": (
            loopq.Override("adapter.weight", {"bits": 8, "steps": "first"}),
            loopq.Override("re:^[qkv]", {"method": "rtn", "group_size": 8}),
            loopq.Override(
                "fc.weight",
                {"method": "gptq-cd", "metric": "inputs", "damping_kind": "diagonal", "levels": "even"},
            ),
            loopq.Override("proj.weight", {"symmetric": False, "step_weights": "balanced"}),
        ),
    },
    "awq": {**G, "method": "awq", "bits": 3},
    "awq-first": {**G, "method": "awq", "bits": 3, "steps": "first"},
    "gptq-cd": CD,
    "gptq-cd-one-path": {**CD, "beam": 1},
    "gptq-cd-4": {**CD, "bits": 4, "damping_kind": "mean"},
    "gptq-cd-asymmetric": {**CD, "symmetric": False},
    "gptq-cd-unsigned": {**CD, "signed_scales": False},
    "gptq-cd-plain": {**CD, "descent": 0, "refit": False, "order": "natural"},
    "trellis": {**CD, "method": "trellis", "damping_kind": "diagonal"},
    "outside": {**G, "bits": 3, "outside": 8},
    "gptq-cd-diagonal": {**CD, "order": "diagonal", "rounds": 1},
}
#: Products by NumPy or torch; their last bits depend on the processor, so elsewhere nearly all codes agree.
ROUNDED = {
    "gptq-hadamard": {**G, "bits": 3, "rotation": "hadamard:8"},
    "gptq-random": {**G, "bits": 3, "rotation": "random", "rotation_seed": 2},
    "gptq-cd-hadamard": {**CD, "rotation": "hadamard:8"},
    "gptq-closed-loop": {**G, "bits": 3, "inputs": "closed-loop"},
    "gptq-asymmetric-inputs": {**G, "bits": 3, "inputs": "asymmetric"},
    "gptq-cd-asymmetric-inputs": {**CD, "inputs": "asymmetric", "alpha": 0.5, "sweeps": 2},
    "weights-asymmetric-inputs": {**G, "bits": 3, "inputs": "asymmetric", "step_weights": "balanced"},
    "loop": LOOP,
    "loop-2": {**LOOP, "bits": 2},
    "loop-passes": {**LOOP, "passes": 2, "metric_draws": 2},
    "loop-memory": {**LOOP, "memory": 400_000},
    "loop-asymmetric-inputs": {**LOOP, "inputs": "asymmetric"},
    "best": {"preset": "best", "inputs": "open", "levels": "even", "bits": 4, "group_size": 16},
}


def solved(case):
    """Layers of one case."""
    from loopq.models.systems.generic import Generic
    from loopq.run import allocate

    torch.manual_seed(0)
    before = torch.get_num_threads()
    # torch sums products in another order with another number of threads. The record has two.
    torch.set_num_threads(2)
    try:
        # The record compares the grids of a budget on four prompts.
        with mock.patch.object(allocate, "SCORED", 4):
            return loopq.quantize(Generic(ExactLoop().eval()), ids(), batch_size=5, threads=1, **case).layers
    finally:
        torch.set_num_threads(before)


def beyond():
    """Cases with objects as settings: bits under a budget."""
    from loopq.run.budget import Fit

    asked = Fit(7111, bits=(2, 4, 8), group_sizes=(8, 16))
    return {"allocate-ablation": {**G, "levels": "even", "fit": asked}}


def main():
    """Write the record."""
    record = {"machine": machine(), "exact": {}, "rounded": {}}
    arrays = {}
    for name, case in EXACT.items():
        record["exact"][name] = digest(solved(case))
    for name, case in (ROUNDED | beyond()).items():
        layers = solved(case)
        record["rounded"][name] = digest(layers)
        for layer in layers.values():
            arrays[f"{name}|{layer.name}|codes"] = layer.codes
            arrays[f"{name}|{layer.name}|scales"] = layer.scales.astype(np.float16)
    (HERE / "quantized.json").write_text(json.dumps(record, indent=1) + "\n")
    np.savez_compressed(HERE / "quantized.npz", **arrays)


if __name__ == "__main__":
    main()
