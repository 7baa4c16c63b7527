"""Keys and values in fewer bits (`loopq run --kv`): `python -m benches.kv MODEL=DIR ... --text FILE`.

DIR is a checkpoint of MODEL that the core runs. Pieces of a text are read token by token. For each cache the
bench prints the KL of its predictions to the model in full precision, and to the codes with the model's own
cache. It also prints how often the most probable token agrees, and the speed in the second half of a piece,
from CPU seconds of one thread.

Then it compares the keys and values of a loop with those of the loop before it: the norm of their difference, relative.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import benches.zoo.register  # noqa: F401  registers the classes of the zoo
import loopq
from benches.quality.peers_table import processor
from loopq.models.load import load_model
from loopq.runtime.runner import Runner
from loopq.runtime.text import prompt_ids
from loopq.systems.base import Batch

CACHES = (None, 8, 4)
#: Bits of a number: those of codes have 16 more for each block of 32.
BITS = {8: 8.5, 4: 4.5}


class Cached:
    """A program with one kind of cache."""

    def __init__(self, system: Any, kv: Any) -> None:
        self.program = system.program(system.n_steps)
        self.runner = Runner(self.program, kv)

    def logits(self, ids: list[int]) -> Tensor:
        """Logits after a text, of which what has been seen is not run again."""
        seen, start = self.runner.seen, self.program.start
        batch = Batch(torch.tensor([ids]), (0,), 0, by_token=True)
        return self.runner.extend(batch.input_ids[0, seen:], None if start is None else start(batch, seen)[0])

    def along(self, ids: list[int]) -> Tensor:
        """Log-probabilities after each token."""
        self.runner.restart()
        return torch.stack([self.logits(ids[:n]) for n in range(1, len(ids) + 1)]).log_softmax(-1)

    def seconds(self, ids: list[int], trials: int) -> float:
        """CPU seconds of a token in the second half of a text. The clock is coarse: a mean over all of them."""
        spent, half = 0.0, len(ids) // 2
        for _ in range(trials):
            self.runner.restart()
            self.logits(ids[:half])
            begun = time.process_time()
            for n in range(half + 1, len(ids) + 1):
                self.logits(ids[:n])
            spent += time.process_time() - begun
        return spent / (trials * (len(ids) - half))


def rolled(system: Any, ids: list[int]) -> Tensor:
    """Log-probabilities of a rollout."""
    with torch.no_grad():
        batch = Batch(torch.tensor([ids]), (0,), 0, by_token=True)
        logp: Tensor = system.rollout(batch, system.n_steps)[0].float().log_softmax(-1)
    return logp


def kl(a: Tensor, b: Tensor) -> float:
    """Mean over tokens."""
    return float((a.exp() * (a - b)).sum(-1).mean())


def likeness(system: Any, ids: list[int]) -> Iterator[tuple[int, float, float]]:
    """Loop, and how far its keys and values are from the loop before: means over the blocks of the loop."""
    calls: list[tuple[Tensor, Tensor]] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def noted(query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any) -> Tensor:
        calls.append((key, value))
        return attention(query, key, value, *args, **more)

    with patch("torch.nn.functional.scaled_dot_product_attention", noted):
        rolled(system, ids)
    of_block: dict[int, list[tuple[Tensor, Tensor]]] = {}
    blocks = [block for name, block in system.program(system.n_steps).order if name == "block"]
    for block, call in zip(blocks, calls, strict=True):
        of_block.setdefault(id(block), []).append(call)
    loops = [of_loops for of_loops in of_block.values() if len(of_loops) > 1]
    for t in range(1, len(loops[0])):
        far = [
            [float((run[t][i] - run[t - 1][i]).norm() / run[t][i].norm()) for run in loops] for i in (0, 1)
        ]
        yield t + 1, sum(far[0]) / len(loops), sum(far[1]) / len(loops)


def lines_of(model: str, folder: str, args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Lines of both tables."""
    full, coded = load_model(model), loopq.load(folder, quantized=True)
    full.model.float()
    ids = prompt_ids(full, Path(args.text).read_text("utf-8")[: 40 * args.length * args.n_texts])
    pieces = [ids[i * args.length : (i + 1) * args.length] for i in range(args.n_texts)]
    exact = [rolled(full.system, piece) for piece in pieces]
    system: Any = coded.system
    program = system.program(system.n_steps)
    numbers = sum(2 * b.kv_heads * b.head for name, b in program.order if name == "block")
    bits_of_model = {torch.bfloat16: 16}.get(next(coded.model.parameters()).dtype, 32)
    name, token = Path(model).name, 0.0
    lines: list[str] = []
    base: list[Tensor] = []
    for kv in CACHES:
        cached = Cached(coded.system, kv)
        logp = [cached.along(piece) for piece in pieces]
        took = cached.seconds(pieces[0], args.trials)
        base, token = (logp, took) if kv is None else (base, token)
        far = sum(map(kl, exact, logp)) / len(pieces)
        moved = sum(map(kl, base, logp)) / len(pieces)
        same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in zip(base, logp, strict=True)])
        bits = BITS.get(kv or 0, bits_of_model)
        lines.append(
            f"| {name} | {kv or 'the model' + chr(39) + 's'} | {bits} | {numbers * bits / 8192:.1f} | {far:.5f} | "
            f"{moved:.5f} | {100 * float(same.float().mean()):.1f} | {1 / took:.1f} | {token / took:.2f} |"
        )
        print(lines[-1], flush=True)
    alike = [f"| {name} | {t} | {k:.2f} | {v:.2f} |" for t, k, v in likeness(full.system, pieces[0])]
    print("\n".join(alike), flush=True)
    return lines, alike


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL=DIR")
    parser.add_argument("--text", required=True)
    parser.add_argument("--length", type=int, default=128, help="tokens of a piece (default %(default)s)")
    parser.add_argument("--n-texts", type=int, default=4)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benches/record"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    tables = [lines_of(model, folder, args) for model, folder in (given.split("=") for given in args.models)]
    text = [
        f"# Keys and values in fewer bits, {datetime.date.today()}", "",
        f"`python -m benches.kv`, {args.n_texts} pieces of {args.length} tokens, one thread of {processor()}. "
        "KL in nats; tokens/s from CPU seconds, second half of a piece.", "",
        "| model | bits | with scales | KiB a token | KL to full precision | KL to the first | same token, % | "
        "tokens/s | over the first |",
        "|---|---|---|---|---|---|---|---|---|", *(line for lines, _ in tables for line in lines), "",
        "How far a loop's keys and values are from the loop before, relative:", "",
        "| model | loop | keys | values |", "|---|---|---|---|", *(line for _, lines in tables for line in lines),
    ]  # fmt: skip
    (args.out / f"kv-{datetime.date.today()}.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
