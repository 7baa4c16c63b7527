"""Gain of calibrating SmolLM2's loop in the format that serves it: special tokens, template, own text, depths.

``python -m benches.zoo.served`` quantizes ``.cache/smollm2/looped`` with preset fast at INT3 in groups of 64,
on 32 prompts of 128 tokens of each kind. It measures each result on raw text and on chats in a template. The
tokenizer of the package adds no special token and has no template, so this file gives both. ``<|im_start|>``
comes first, as from a tokenizer with BOS, and turns follow ChatML. ``python -m benches.zoo.served sink``
prints the attention on the first token.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import loopq
from benches.zoo.smollm2 import CORPORA
from loopq.calibrate.data import TokenSet, windows
from loopq.calibrate.read import Served, read_tokens
from loopq.calibrate.written import written
from loopq.models.load import LoadedModel, load_model

N, LENGTH, GROUP = 32, 128, 64
BITS: Literal[3] = 3
#: Kinds of test prompts, and how many of each.
TESTS, N_TESTS = ("text", "records in the template"), 16
FIRST = (1,)  # <|im_start|>
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def prompts(loaded: LoadedModel, data: Path, split: str) -> dict[str, TokenSet]:
    """Prompts of each kind, of the training data or of the test data."""
    if split == "train":
        with lzma.open(data / CORPORA[0], "rt", encoding="utf-8") as lines:
            text = "\n\n".join(json.loads(next(lines))["text"] for _ in range(100))
    else:
        text = (data / "wikitext2" / "wiki.test.raw").read_text()[:100_000]
    chats = data / "gsm8k" / f"{split}.jsonl"
    loaded.tokenizer.chat_template = CHATML

    def records(template: bool) -> TokenSet:
        served = Served(loaded.encode, FIRST, (), loaded.tokenizer, "question,answer", template)
        return read_tokens(chats, served, LENGTH, N)

    return {
        "text": windows(text, loaded.encode, LENGTH, N, "text"),
        "text, BOS": windows(text, loaded.encode, LENGTH, N, "text", FIRST),
        "records, BOS": records(template=False),
        "records in the template": records(template=True),
    }


def row(work: Path, data: Path, name: str, threads: int) -> dict[str, Any]:
    """KL on each kind of test prompt, calibrated on one kind. A row that is there is not computed again."""
    kept = work / "served" / f"{name.replace(', ', '-').replace(' ', '-')}.json"
    if kept.exists():
        saved: dict[str, Any] = json.loads(kept.read_text())
        return saved
    loaded = load_model(str(work / "looped"), dtype="float32")
    kinds = prompts(loaded, data, "train")
    depths: Any = [1, 2, 3] if name.endswith("depths 1,2,3") else None
    if name == "own text":
        known = np.arange(3, len(loaded.tokenizer))
        tokens = written(loaded.system, FIRST, known, LENGTH, N)
    else:
        tokens = kinds[name.removesuffix(", depths 1,2,3")]
    result = loopq.quantize(
        loaded, tokens, n_steps=depths, preset="fast", bits=BITS, group_size=GROUP, threads=threads
    )
    measured = {}
    tests = prompts(loaded, data, "test")
    for kind in TESTS:
        one = loopq.evaluate(loaded, {name: result}, tests[kind].take(0, N_TESTS), threads=threads)[1]
        interval = one.kl_interval()
        assert interval is not None
        measured[kind] = [float(one.kl.mean()), interval.low, interval.high, float(one.agreement.mean())]
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(measured))
    return measured


def sink(work: Path, data: Path) -> None:
    """Print the share of attention on the first token, from the sixteenth position on, with and without BOS."""
    loaded = load_model(str(work / "looped"), dtype="float32")
    loaded.model.config._attn_implementation = "eager"
    shares: list[torch.Tensor] = []
    for layer in loaded.model.model.layers:
        layer.self_attn.register_forward_hook(
            lambda *call: shares.append(call[2][1][:, :, 16:, 0].mean((0, 2)))
        )
    for kind, tokens in prompts(loaded, data, "test").items():
        shares.clear()
        for batch in tokens.batches(8):
            loaded.system.rollout(batch, loaded.system.n_steps)
        order: Any = loaded.system
        visits = len(order._order(loaded.system.n_steps))
        heads = torch.stack(shares).unflatten(0, (-1, visits)).mean(0)
        over = (heads > 0.5).double().mean()
        print(
            f"{kind}: {heads.mean():.0%} on the first token; over half in {over:.0%} of {heads.numel()} heads"
        )


def main() -> None:
    """Print the table, or the attention on the first token."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("table", "sink"), default="table")
    parser.add_argument("--work", type=Path, default=Path(".cache/smollm2"))
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("LOOPQ_DATA", "../shared/data")))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", help="compute this row alone")
    args = parser.parse_args()
    if args.what == "sink":
        sink(args.work, args.data)
        return
    names = [
        "text",
        "text, BOS",
        "records, BOS",
        "records in the template",
        "own text",
        "text, BOS, depths 1,2,3",
    ]
    for name in [args.only] if args.only else names:
        measured = row(args.work, args.data, name, args.threads)
        cells = " | ".join(f"{kl:.4f} [{low:.3f}, {high:.3f}]" for kl, low, high, _ in measured.values())
        print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
