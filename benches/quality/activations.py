"""What rounded activations and a rounded cache of keys and values cost beside 4-bit weights.

    python -m benches.quality.activations [MODEL ...] [--bits 4] [--record FILE]
    python -m benches.quality.activations --page RECORD      # the table of docs/next.md from a record

The same codes, held-out prompts and initial states throughout. "int8 product" is loopq's own, with packed codes and
8-bit activations; the other rows are simulated: the input of every quantized layer is rounded to a symmetric grid and
multiplied in float32, or keys and values are rounded where attention takes them. Static scales are the largest
magnitude on the calibration prompts, over all steps or by step; "rotated" rounds in a Hadamard basis of the input and
returns to the model's. Ratios are to the same codes with activations in float32, with 95 % intervals over prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import benches.zoo.register  # noqa: F401  opens the folders of the small models
import loopq
from benches.pages import into
from benches.python.record import write
from benches.quality.run import ROOT, table
from benches.zoo import WEIGHTS
from loopq.calibrate.prompts import Take, calibration_tokens, evaluation_tokens
from loopq.evaluate.compare import _output, _score
from loopq.evaluate.stats import geometric_mean_ratio
from loopq.layers.transforms import Rotation
from loopq.models.load import load_model
from loopq.systems.base import LoopedSystem

MODELS = ("huginn_small", "ouro_small", "rllama_small", "nanbeige_small")
DOCUMENT = ROOT / "docs" / "next.md"
N_PROMPTS, SEQ_LEN, BATCH = 32, 128, 8
#: Takes the input of a layer, its name and the step; gives the rounded input.
Scheme = Callable[[Tensor, str, int], Tensor]


def to_grid(x: Tensor, scale: Tensor | float) -> Tensor:
    """Round to integers times a scale, 15 of them at 4 bits; the scale is the largest magnitude over 7."""
    return (x / scale).round() * scale


def by_row(x: Tensor, bits: int) -> Tensor:
    """Round with one scale for each row of the last dimension."""
    top = 2 ** (bits - 1) - 1
    return to_grid(x, x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / top)


def by_group(x: Tensor, bits: int, size: int) -> Tensor:
    """Round with one scale for each token and group of inputs."""
    padded = F.pad(x, (0, -x.shape[-1] % size))
    return by_row(padded.unflatten(-1, (-1, size)), bits).flatten(-2)[..., : x.shape[-1]]


def rotated(x: Tensor, bits: int) -> Tensor:
    """Round by token in a Hadamard basis of the input."""
    basis = torch.from_numpy(Rotation(x.shape[-1], "hadamard", x.shape[-1]).matrix(x.shape[-1])).float()
    return by_row(x @ basis.T, bits) @ basis


class Static:
    """Scales of calibration: the largest magnitudes by layer, and by layer and step."""

    def __init__(self) -> None:
        self.largest: dict[tuple[str, int], float] = {}

    def watch(self, x: Tensor, name: str, step: int) -> Tensor:
        """Take note of an input and leave it as it is."""
        self.largest[name, step] = max(self.largest.get((name, step), 0.0), float(x.abs().max()))
        return x

    def scheme(self, bits: int, each_step: bool) -> Scheme:
        """Round with them; what lies beyond is clipped."""
        top = 2 ** (bits - 1) - 1
        whole: dict[str, float] = {}
        for (name, _), value in self.largest.items():
            whole[name] = max(whole.get(name, 0.0), value)

        def scheme(x: Tensor, name: str, step: int) -> Tensor:
            scale = (self.largest[name, step] if each_step else whole[name]) / top
            return to_grid(x.clamp(-scale * top, scale * top), scale)

        return scheme


@contextlib.contextmanager
def inputs(system: LoopedSystem, scheme: Scheme) -> Iterator[None]:
    """Round what every quantized layer receives; its n-th call in a rollout is step n."""
    modules = dict(system.model.named_modules())
    calls: dict[str, int] = {}
    handles = []

    def hook(name: str) -> Callable[[Any, tuple[Tensor, ...]], tuple[Tensor, ...]]:
        def before(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            step = calls.get(name, 0)
            calls[name] = step + 1
            return (scheme(args[0], name, step), *args[1:])

        return before

    for parameter in system.shared_parameters(system.n_steps):
        if parameter.treatment == "gptq":
            owner = parameter.owners[0]
            handles.append(modules[owner].register_forward_pre_hook(hook(owner)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def cache(keys: Callable[[Tensor], Tensor], values: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Round the keys and values that attention takes, (batch, heads, tokens, width)."""
    plain = F.scaled_dot_product_attention

    def attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **more: Any) -> Tensor:
        return plain(q, keys(k), values(v), *args, **more)

    with mock.patch.object(F, "scaled_dot_product_attention", attention):
        yield


def schemes(system: LoopedSystem, static: Static) -> dict[str, Callable[[], Any]]:
    """Every simulated row: what to hold around a rollout."""

    def token(bits: int) -> Scheme:
        return lambda x, name, step: by_row(x, bits)

    def rows(bits: int) -> Callable[[Tensor], Tensor]:
        return lambda x: by_row(x, bits)

    def channels(bits: int) -> Callable[[Tensor], Tensor]:
        return lambda x: by_row(x.transpose(-1, -2), bits).transpose(-1, -2)

    found: dict[str, Scheme] = {}
    for bits in (8, 4):
        found |= {
            f"A{bits}, static": static.scheme(bits, False),
            f"A{bits}, static by step": static.scheme(bits, True),
            f"A{bits}, by token": token(bits),
        }
    found |= {
        "A4, by token and group of 32": lambda x, name, step: by_group(x, 4, 32),
        "A4, by token, rotated": lambda x, name, step: rotated(x, 4),
    }
    made: dict[str, Callable[[], Any]] = {
        name: functools.partial(inputs, system, scheme) for name, scheme in found.items()
    }
    return made | {
        "KV8, by token and head": lambda: cache(rows(8), rows(8)),
        "KV4, by token and head": lambda: cache(rows(4), rows(4)),
        "KV4, keys by channel": lambda: cache(channels(4), rows(4)),
    }


def measure(name: str, bits: int) -> list[dict[str, Any]]:
    """KL and agreement of one model's codes with every kind of rounding."""
    folder = WEIGHTS / name
    full = load_model(str(folder) if folder.is_dir() else name)
    result = loopq.quantize(full, bits=bits, n_prompts=64, seq_len=SEQ_LEN)
    dense = loopq.load(result).system
    products = {
        "codes": loopq.load(result, quantized=True).system,
        "int8 product": loopq.load(result, quantized=True, activations="int8").system,
    }
    static = Static()
    runs: dict[str, tuple[LoopedSystem, Callable[[], Any]]] = {
        "A32": (dense, contextlib.nullcontext),
        **{key: (system, contextlib.nullcontext) for key, system in products.items()},
    }
    scores: dict[str, list[Any]] = {}
    with torch.inference_mode():
        for batch in calibration_tokens(full, None, Take(64, SEQ_LEN)).batches(BATCH, 0):
            with inputs(dense, static.watch):
                dense.rollout(batch, full.system.n_steps)
        runs |= {key: (dense, held) for key, held in schemes(dense, static).items()}
        for batch in evaluation_tokens(full, None, Take(N_PROMPTS, SEQ_LEN)).batches(BATCH, 0):
            reference = _output(full.system, batch, full.system.n_steps)
            for key, (system, held) in runs.items():
                with held():
                    out = _output(system, batch, full.system.n_steps)
                scores.setdefault(key, []).append(_score(full.system, reference, out, batch, 0)[:2])
    joined = {key: np.concatenate(found, axis=1) for key, found in scores.items()}
    return [
        {
            "model": name, "bits": bits, "activations": key, "kl": float(kl.mean()),
            "agreement": float(agreement.mean()),
            "ratio": geometric_mean_ratio([kl], [joined["A32"][0]]).to_json(),
        }
        for key, (kl, agreement) in joined.items()
    ]  # fmt: skip


#: Rows of docs/next.md by the names of the record.
ROWS = {
    "int8 product": "8 bits, loopq's product: by token and group",
    "A8, by token": "8 bits, by token",
    "A8, static": "8 bits, one static scale",
    "A8, static by step": "8 bits, a static scale for each step",
    "A4, static": "4 bits, one static scale",
    "A4, static by step": "4 bits, a static scale for each step",
    "A4, by token": "4 bits, by token",
    "A4, by token, rotated": "4 bits, by token, Hadamard basis",
    "A4, by token and group of 32": "4 bits, by token and group of 32",
    "KV8, by token and head": "keys and values in 8 bits, by token and head",
    "KV4, by token and head": "keys and values in 4 bits, by token and head",
    "KV4, keys by channel": "the same, keys by channel",
}


def page(found: list[dict[str, Any]]) -> str:
    """The ratios as a table of Markdown, two digits and more where they are below 100."""
    models = list(dict.fromkeys(row["model"] for row in found))
    cells = {(row["activations"], row["model"]): _cell(row["ratio"]) for row in found}
    lines = [f"| | {' | '.join(models)} |", "|" + "---|" * (1 + len(models))]
    lines += [f"| {said} | {' | '.join(cells[key, m] for m in models)} |" for key, said in ROWS.items()]
    return "\n".join(lines)


def _cell(ratio: dict[str, float]) -> str:
    digits = 2 if ratio["estimate"] < 4.5 else 1 if ratio["estimate"] < 10 else 0
    estimate, low, high = (f"{ratio[k]:.{digits}f}" for k in ("estimate", "low", "high"))
    return f"{estimate} [{low}, {high}]"


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--record", type=Path)
    parser.add_argument(
        "--page", type=Path, metavar="RECORD", help="run nothing: write docs/next.md from a record"
    )
    args = parser.parse_args()
    if args.page:
        into(DOCUMENT, "activations", page(json.loads(args.page.read_text())["results"]))
        return
    found = [row for name in args.models for row in measure(name, args.bits)]
    lines: dict[str, dict[str, Any]] = {}
    for row in found:
        ratio = row["ratio"]
        said = f"{row['kl']:.5f}, {ratio['estimate']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"
        lines.setdefault(row["activations"], {"what": row["activations"]})[row["model"]] = said
    print(table(list(lines.values()), [("what", "activations", ""), *((m, m, "") for m in args.models)]))
    write(args.record, found)


if __name__ == "__main__":
    main()
