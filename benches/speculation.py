"""What fewer loops of the same weights could gain as a draft: `python -m benches.speculation DIR ...`.

Each DIR is a checkpoint that `loopq run` runs in the core. Text is generated greedily at the model's depth N. At every
depth m below it the bench counts how often the most probable token is the same, for the same text before it. It times
one token at depth m and k tokens at once at depth N, in CPU seconds of one thread, best of several trials.

A cycle drafts k tokens one after another at depth m and verifies them at once. It gives (1 - a^k) / (1 - a) tokens, a
being the share of drafts that are right. The verification may begin behind loop m, since the loops before it have the
same inputs at both depths: the bench takes it to cost the k tokens at depth N less the k tokens at depth m. That leaves
out a head and what follows the loop, and all that a program would do beside: the ratio is more than can be reached.
"""

from __future__ import annotations

import argparse
import datetime
import time
from pathlib import Path
from typing import Any

import torch

import benches.zoo.register  # noqa: F401  registers the classes of the zoo
import loopq
from benches.quality.peers_table import processor
from loopq.inference.runner import Runner
from loopq.systems.base import Batch

LENGTHS = (1, 2, 3, 4, 6, 8)


class Timed:
    """A model's runner at one depth."""

    def __init__(self, system: Any, n_steps: int) -> None:
        program = system.program(n_steps)
        if program is None:
            raise SystemExit(f"{system.name}: the core does not run it")
        self.program, self.runner = program, Runner(program)

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits after a text, of which what has been seen is not run again."""
        seen, start = self.runner.seen, self.program.start
        batch = Batch(torch.tensor([ids]), (0,), 0, by_token=True)
        return self.runner.extend(batch.input_ids[0, seen:], None if start is None else start(batch, seen)[0])

    def seconds(self, text: list[int], trials: int) -> dict[int, float]:
        """Seconds of so many tokens at once, behind the first half of a text."""
        found = dict.fromkeys(LENGTHS, 1e9)
        for _ in range(trials):
            for n in LENGTHS:
                self.runner.restart()
                self.logits(text[: len(text) // 2])
                begun = time.process_time()
                self.logits(text[: len(text) // 2 + n])
                found[n] = min(found[n], time.process_time() - begun)
        return found


def rows_of(folder: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Acceptance and times at every depth below the model's own, and the best length of a draft."""
    system = loopq.load(folder, quantized=True).system
    whole = Timed(system, system.n_steps)
    text = [(7 * i) % 200 + 20 for i in range(8)]
    chosen: dict[int, int] = {}
    while len(text) < args.n_tokens:
        chosen[len(text)] = int(whole.logits(text).argmax())
        text.append(chosen[len(text)])
    full = whole.seconds(text, args.trials)
    rows = []
    for depth in range(1, system.n_steps):
        draft = Timed(system, depth)
        right = [int(draft.logits(text[:n]).argmax()) == token for n, token in chosen.items()]
        share, own = sum(right) / len(right), draft.seconds(text, args.trials)
        ratio = {}
        for k in LENGTHS[1:]:
            tokens = sum(share**i for i in range(k))
            ratio[k] = tokens * full[1] / (k * own[1] + max(full[k] - own[k], 0.0))
        k = max(ratio, key=lambda k: ratio[k])
        rows.append(
            {
                "model": Path(folder).name, "n_steps": system.n_steps, "depth": depth, "share": share,
                "draft": own[1] / full[1], "batch": {n: full[n] / full[1] for n in LENGTHS}, "k": k, "ratio": ratio[k],
                "ms": 1e3 * full[1],
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", metavar="DIR")
    parser.add_argument("--n-tokens", type=int, default=96)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("benches/record"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        f"# Fewer loops as a draft, {datetime.date.today()}", "",
        f"`python -m benches.speculation {' '.join(Path(f).name for f in args.folders)}`, one thread of {processor()}; "
        "CPU seconds, relative to one token at full depth. Right: drafts that are the token of full depth. The ratio "
        "of tokens per second is an upper bound (the module says what it leaves out).", "",
        "| model | loops | token, ms | 2, 4, 8 tokens at once | draft at | right | draft's token | best k | at most |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for folder in args.folders:
        for row in rows_of(folder, args):
            at_once = ", ".join(f"{row['batch'][n]:.2f}" for n in (2, 4, 8))
            lines.append(
                f"| {row['model']} | {row['n_steps']} | {row['ms']:.2f} | {at_once} | {row['depth']} | "
                f"{100 * row['share']:.0f} % | {row['draft']:.2f} | {row['k']} | {row['ratio']:.2f} |"
            )
            print(lines[-1], flush=True)
    (args.out / f"speculation-{datetime.date.today()}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
