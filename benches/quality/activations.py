"""KL to full precision of one quantized model with its activations in float and in 8 bits.

    python -m benches.quality.activations [huginn_small ouro_small ...] [--bits 4] [--record FILE]

The same codes run twice on the processor, as they are loaded by `loopq.load(..., quantized=True)` and with
`activations="int8"`, on the same held-out prompts and initial states.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import benches.zoo.register  # noqa: F401  opens the folders of the small models
import loopq
from benches.zoo import folders
from loopq.calibrate.prompts import Take, evaluation_tokens
from loopq.evaluate.compare import _output, _score
from loopq.systems.load import load_model

N_PROMPTS, SEQ_LEN = 32, 128


def measure(name: str, bits: int) -> dict[str, Any]:
    """KL and agreement of W4A16, W4A8 and of dense weights made from the same codes."""
    source = next((folder for folder in folders() if Path(folder).name == name), name)
    full = load_model(source)
    result = loopq.quantize(source, bits=bits, n_prompts=64, seq_len=SEQ_LEN)
    tokens = evaluation_tokens(full, None, Take(N_PROMPTS, SEQ_LEN))
    variants = {
        "dense": loopq.load(result),
        "float": loopq.load(result, quantized=True),
        "int8": loopq.load(result, quantized=True, activations="int8"),
    }
    scores: dict[str, list[Any]] = {variant: [] for variant in variants}
    with torch.inference_mode():
        for batch in tokens.batches(8, 0):
            reference = _output(full.system, batch, full.system.n_steps)
            for variant, loaded in variants.items():
                out = _output(loaded.system, batch, full.system.n_steps)
                scores[variant].append(_score(full.system, reference, out, batch, 0)[:2])
    means = {variant: np.concatenate(found, axis=1).mean(axis=1) for variant, found in scores.items()}
    return {
        "model": name, "bits": bits, "n_prompts": N_PROMPTS, "seq_len": SEQ_LEN, "n_steps": full.system.n_steps,
        "kl": {variant: float(mean[0]) for variant, mean in means.items()},
        "agreement": {variant: float(mean[1]) for variant, mean in means.items()},
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["huginn_small", "ouro_small"])
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    found = [measure(name, args.bits) for name in args.models]
    for row in found:
        print(json.dumps(row))
    if args.record:
        args.record.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
